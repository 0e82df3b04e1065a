"""The server's side of one HTTP/1.1 connection: requests in, answers out, and the knowledge whether the client is still there.

One task reads all the time, so that the client's leaving is noticed while its request is answered. The other answers one
request after the other, and is the only one that sends. Requests that a client sends before the first is answered
(pipelining) are therefore answered in order; beyond ``_PIPELINE`` of them, and the piece that held the last, nothing more is
read from its socket.
"""

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, TypeAlias, final

import attrs
import msgspec
import trio

from .._util.condition import Condition
from .._util.exception_groups import bare_errors
from .answer import CONTINUE, EVENT_STREAM_HEADERS, LAST_CHUNK, answer_head, chunk, event, whole_answer
from .server_reader import BadRequest, Request, RequestReader

_PIPELINE: Final = 16
_PIECE: Final = 65536
# A client sends a head in one go; one that takes longer is broken, or means harm.
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
    """One client's connection. The stream stays its caller's, who closes it.

    Invariant: only the task that called ``serve`` sends, so a handler may send on ``stream`` itself, damaged answers too.
    """

    stream: trio.abc.Stream
    reader: RequestReader = attrs.field(factory=RequestReader)
    head_s: float = attrs.field(default=_HEAD_S, kw_only=True)
    """Seconds from the first byte of a head within which the rest of it must come."""
    gone: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set when the client has closed its side, or the connection is broken."""
    keep_open: bool = attrs.field(default=True, init=False)
    """The connection carries another request after this answer. A handler may clear it."""
    _news: Condition = attrs.field(factory=Condition, init=False)
    _streaming: trio.CancelScope | None = attrs.field(default=None, init=False)
    _head_only: bool = attrs.field(default=False, init=False)
    _head_deadline: float = attrs.field(default=math.inf, init=False)

    async def serve(self, handle: Callable[["ServerConnection", Request], Awaitable[None]]) -> None:
        """Let ``handle`` answer each request, until the client leaves or an answer says that the connection ends.

        A request that cannot be parsed is answered with its error. When the client leaves during ``handle``, ``gone`` is
        set and nothing is cancelled, except what sends ``events``. Blocks until then; cancelled, the connection is useless.
        Raises what ``handle`` raises, except that the connection broke or the client left.
        """
        with bare_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                try:
                    await self._answer_all(handle)
                except* (trio.BrokenResourceError, trio.ClosedResourceError, ClientGone):
                    pass  # there is no client to tell
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
                    self._head_deadline = math.inf  # a head that is incomplete now began in this piece
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
        if not self.reader.in_head:
            return bytes(await self.stream.receive_some(_PIECE))
        if self._head_deadline == math.inf:
            self._head_deadline = trio.current_time() + self.head_s
        with trio.move_on_at(self._head_deadline):
            return bytes(await self.stream.receive_some(_PIECE))
        self.reader.refuse(BadRequest(f"no complete head within {self.head_s:g} s", status=HTTPStatus.REQUEST_TIMEOUT))
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
        """Answer with server-sent events: what ``produce(emit)`` emits. ``produce`` is cancelled when the client leaves.

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
