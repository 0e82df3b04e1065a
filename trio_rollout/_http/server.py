"""The server's side of one HTTP/1.1 connection: requests in, answers out, and notice of a client that leaves.

One task reads all the time, so that a client that leaves is noticed while its request is answered. The other task answers one
request after the other, and only it sends. Requests that a client sends before the first is answered (pipelining) are
therefore answered in order; once ``_PIPELINE`` of them wait, nothing more is read from the socket
(docs/decisions/0036-one-http-server-side.md). The functions that make answers as bytes are for a fake that sends a part of one.
"""

import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, TypeAlias, final

import attrs
import msgspec
import trio

from .._util.condition import Condition
from .._util.exception_groups import bare_errors
from .server_reader import BadRequest, Request, RequestReader

_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
EVENT_STREAM_HEADERS: Final = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("transfer-encoding", "chunked"),
)
"""Of an answer whose body is a stream of events, sent as chunks."""


def answer_head(status: int, headers: Iterable[tuple[str, str]], *, version: str = "1.1") -> bytes:
    """Return the status line, these headers, and the empty line."""
    lines = [f"HTTP/{version} {status} {_PHRASES.get(status, '')}", *[f"{name}: {value}" for name, value in headers]]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def whole_answer(status: int, body: bytes, headers: Iterable[tuple[str, str]], *, head_only: bool = False) -> bytes:
    """Return an answer whose length is announced; ``head_only`` for a HEAD request."""
    head = answer_head(status, [*headers, ("content-length", str(len(body)))])
    return head if head_only else head + body


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body; ``data`` must not be empty, for that would be the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: bytes) -> bytes:
    """Return one server-sent event; ``data`` must be a single line."""
    return b"data: %b\n\n" % data


_PIPELINE: Final = 16
_PIECE: Final = 65536
# Clients send a head in one go; one that takes this long is broken or hostile.
_HEAD_S: Final = 60.0
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"
_NO_REQUEST: Final = b"Invalid HTTP request received."  # uvicorn's words, and so SGLang's


class ClientGone(Exception):
    """The client has closed its connection, and can get no answer any more."""


Emit: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Sends the data of one event of a stream."""


@final
@attrs.define(eq=False, repr=False)
class ServerConnection:
    """One client's connection. The caller owns ``stream``, and closes it after ``serve``.

    Invariant: only the task that called ``serve`` sends. A handler may therefore send on ``stream`` itself.
    """

    stream: trio.abc.Stream
    reader: RequestReader = attrs.field(factory=RequestReader)
    head_s: float = attrs.field(default=_HEAD_S, kw_only=True)
    """Seconds from the first byte of a head to its last one; then the client is answered 408."""
    gone: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set when the client has closed its side, or the connection is broken."""
    keep_open: bool = attrs.field(default=True, init=False)
    """True if the connection carries another request after this answer. A handler may set it to False."""
    _news: Condition = attrs.field(factory=Condition, init=False)
    _streaming: trio.CancelScope | None = attrs.field(default=None, init=False)
    _head_only: bool = attrs.field(default=False, init=False)
    _head_deadline: float = attrs.field(default=math.inf, init=False)

    async def serve(self, handle: Callable[["ServerConnection", Request], Awaitable[None]]) -> None:
        """Answer each request by ``handle``, until the client leaves or ``keep_open`` is False.

        A request that cannot be parsed is answered with its error. If the client leaves during ``handle``, ``gone`` is set;
        only ``events`` is cancelled, other handlers run on. Blocks until the end of the connection; cancelled, an answer may
        have been sent in part. Errors of ``handle`` come out, except those of a broken connection and ClientGone.
        """
        with bare_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                try:
                    await self._answer_all(handle)
                except* (trio.BrokenResourceError, trio.ClosedResourceError, ClientGone):
                    pass  # no client is left to answer
                nursery.cancel_scope.cancel("the connection ends")

    async def _answer_all(self, handle: Callable[["ServerConnection", Request], Awaitable[None]]) -> None:
        while self.keep_open:
            try:
                request = await self._next()
            except BadRequest as error:
                await self.reply(error.status, _NO_REQUEST, _TEXT)
                return
            if request is None:
                return
            self._head_only = request.method == "HEAD"
            self.keep_open = request.keep_alive
            await handle(self, request)

    async def _next(self) -> Request | None:
        reader = self.reader
        while True:
            await self._news.wait_until(self._has_news)
            request = reader.next()
            if request is not None:
                self._news.notify()
                return request
            if not reader.expects_continue:
                return None
            reader.continued()
            await self.stream.send_all(CONTINUE)

    def _has_news(self) -> bool:
        reader = self.reader
        return reader.has_next or reader.expects_continue or self.gone.is_set()

    async def _read(self) -> None:
        reader = self.reader
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await self._receive():
                waiting = reader.waiting
                reader.feed(data)
                if reader.waiting > waiting:
                    self._head_deadline = math.inf  # a head that is still incomplete began in this piece
                self._news.notify()
                if reader.waiting >= _PIPELINE:
                    await self._news.wait_until(lambda: reader.waiting < _PIPELINE)
        reader.feed(b"")
        self.gone.set()
        self._news.notify()
        if self._streaming is not None:
            self._streaming.cancel("the client closed its connection")

    async def _receive(self) -> bytes:
        """Return the next piece; empty at the end of the stream."""
        if self.reader.in_head:
            if self._head_deadline == math.inf:
                self._head_deadline = trio.current_time() + self.head_s
            with trio.move_on_at(self._head_deadline):
                return bytes(await self.stream.receive_some(_PIECE))
            why = f"no complete head within {self.head_s:g} s"
            self.reader.refuse(BadRequest(why, status=HTTPStatus.REQUEST_TIMEOUT))
            self._news.notify()
        return bytes(await self.stream.receive_some(_PIECE))

    @property
    def in_stream(self) -> bool:
        """True while ``events`` is being sent: no other answer can be given any more."""
        return self._streaming is not None

    async def reply(self, status: int, body: bytes = b"", content_type: str = _JSON) -> None:
        """Answer with a whole body.

        Raises:
          BrokenResourceError: the connection is broken.
        """
        head_only = self._head_only
        await self.stream.send_all(whole_answer(status, body, (("content-type", content_type),), head_only=head_only))

    async def reply_json(self, status: int, value: Any) -> None:
        """Answer with ``value`` as JSON; raises as ``reply`` does."""
        await self.reply(status, msgspec.json.encode(value))

    async def events(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        """Answer with the server-sent events that ``produce(emit)`` emits. ``produce`` is cancelled when the client leaves.

        Raises:
          ClientGone: the client has left.
        """
        with trio.CancelScope() as scope:
            self._streaming = scope
            if self.gone.is_set():
                scope.cancel("the client closed its connection")
            await self.stream.send_all(answer_head(HTTPStatus.OK, EVENT_STREAM_HEADERS))
            await produce(self._emit)
            await self.stream.send_all(LAST_CHUNK)
        self._streaming = None
        if scope.cancelled_caught:
            raise ClientGone("the client closed its connection")

    async def _emit(self, data: bytes) -> None:
        await self.stream.send_all(chunk(event(data)))
