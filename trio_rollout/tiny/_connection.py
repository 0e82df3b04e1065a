"""HTTP/1.1 on one stream: requests in, answers out, and the knowledge whether the client is still there.

Owns: the stream. Two tasks: one reads all the time, so that a client that leaves is noticed while its request runs; the
other answers one request after the other.
"""

import contextlib
import http
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, final
from urllib.parse import parse_qsl, urlsplit

import attrs
import httptools
import msgspec
import trio

from ._frontend import ClientGone
from ._refusal import Refusal

_PIPELINE = 16
"""Requests that a client may send before the first is answered; more stay in its socket."""
_CHUNK = 65536
_LONGEST_BODY = 64 * 1024 * 1024
_JSON = b"application/json"
_EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}


Emit: TypeAlias = Callable[[Any], Awaitable[None]]
"""Sends one event of a stream."""


@attrs.frozen(eq=False, kw_only=True)
class HttpRequest:
    """One request, read to its end."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes
    keep_alive: bool


@final
@attrs.define(eq=False, repr=False)
class _Parts:
    """httptools calls these while it parses; a finished request lands in ``done``."""

    done: list[HttpRequest] = attrs.field(factory=list)
    parser: Any = None
    wants_continue: bool = False
    _url: bytes = b""
    _body: bytearray = attrs.field(factory=bytearray)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self.wants_continue = True

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _LONGEST_BODY:
            raise ValueError(f"a body may have {_LONGEST_BODY} bytes")

    def on_message_complete(self) -> None:
        parts = urlsplit(self._url.decode("latin-1"))
        self.done.append(
            HttpRequest(
                method=self.parser.get_method().decode(),
                path=parts.path,
                query=dict(parse_qsl(parts.query)),
                body=bytes(self._body),
                keep_alive=self.parser.should_keep_alive(),
            )
        )


@final
@attrs.define(eq=False, repr=False)
class Connection:
    """One client. ``gone`` is set when it has closed its side."""

    stream: trio.abc.Stream
    gone: trio.Event = attrs.field(factory=trio.Event, init=False)
    _streaming: trio.CancelScope | None = attrs.field(default=None, init=False)
    _head_only: bool = attrs.field(default=False, init=False)

    async def serve(self, answer: Callable[["Connection", HttpRequest], Awaitable[None]]) -> None:
        """Answer requests until the client leaves. What it had running is left to notice that by itself."""
        send, receive = trio.open_memory_channel[HttpRequest](_PIPELINE)
        async with self.stream:
            with receive:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read, send)
                    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, ClientGone):
                        await self._answer_all(receive, answer)
                    nursery.cancel_scope.cancel()

    async def _answer_all(
        self,
        requests: trio.MemoryReceiveChannel[HttpRequest],
        answer: Callable[["Connection", HttpRequest], Awaitable[None]],
    ) -> None:
        async for request in requests:
            self._head_only = request.method == "HEAD"
            await answer(self, request)
            if not request.keep_alive:
                return

    async def _read(self, send: trio.MemorySendChannel[HttpRequest]) -> None:
        parts = _Parts()
        parser = parts.parser = httptools.HttpRequestParser(parts)
        async with send:
            while True:
                try:
                    data = await self.stream.receive_some(_CHUNK)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    data = b""
                if not data:
                    break
                try:
                    parser.feed_data(data)
                except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError):
                    await send.send(HttpRequest(method="", path="", query={}, body=b"", keep_alive=False))
                    return  # what follows cannot be understood: a router's cleartext HTTP/2 preface ends here
                if parts.wants_continue:
                    parts.wants_continue = False
                    await self.stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                for request in parts.done:
                    await send.send(request)
                parts.done.clear()
            self.gone.set()
            if self._streaming is not None:
                self._streaming.cancel("the client closed its connection")

    @property
    def in_stream(self) -> bool:
        """Whether the answer is a stream that has begun and not ended: no other answer can be given any more."""
        return self._streaming is not None

    async def reply(self, status: int, body: bytes = b"", content_type: bytes = _JSON) -> None:
        """Answer with a whole body."""
        head = b"HTTP/1.1 %d %s\r\ncontent-length: %d\r\ncontent-type: %s\r\n\r\n" % (
            status,
            _PHRASES.get(status, b""),
            len(body),
            content_type,
        )
        await self.stream.send_all(head if self._head_only else head + body)

    async def reply_json(self, status: int, value: Any) -> None:
        """Answer with ``value`` as JSON."""
        await self.reply(status, msgspec.json.encode(value))

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error."""
        await self.reply_json(refusal.status, refusal.body)

    async def events(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        """Answer with server-sent events: what ``produce(emit)`` emits, then [DONE]. Cancelled when the client leaves.

        Raises:
          ClientGone: it has left.

        """
        with trio.CancelScope() as scope:
            self._streaming = scope
            if self.gone.is_set():
                scope.cancel("the client closed its connection")
            await self.stream.send_all(_EVENTS_HEAD)
            await produce(self._emit)
            await self._event(b"[DONE]")
            await self.stream.send_all(b"0\r\n\r\n")
        self._streaming = None
        if scope.cancelled_caught:
            raise ClientGone("the client closed its connection")

    async def _emit(self, value: Any) -> None:
        await self._event(msgspec.json.encode(value))

    async def _event(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        await self.stream.send_all(b"%x\r\n%s\r\n" % (len(event), event))
