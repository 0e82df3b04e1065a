"""The server's side of HTTP for FakeSGLang: requests off a stream, answers onto it, whole or damaged."""

import enum
import gzip
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final, TypeAlias, final

import attrs
import httptools
import trio

from .._sim.connection import SimStream
from .plan import Fault


@attrs.frozen(kw_only=True)
class HttpRequest:
    """A request."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    keep_alive: bool


class NotHttp(Exception):
    """The client speaks something else."""


@final
class RequestReader:
    """Requests of one connection, one after the other."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._pending = b""

    async def next(self) -> HttpRequest | None:
        """The next request; None at the end of the stream."""
        self._target, self._body, self._complete = b"", bytearray(), False
        self._headers: dict[str, str] = {}
        parser = httptools.HttpRequestParser(self)
        data, self._pending = self._pending, b""
        while True:
            if data:
                self._feed(parser, data)
            if self._complete:
                break
            data = bytes(await self._stream.receive_some(65536))
            if not data:
                return None
        return HttpRequest(
            method=parser.get_method().decode("ascii"),
            path=self._target.partition(b"?")[0].decode("latin-1"),
            body=bytes(self._body),
            headers=self._headers,
            keep_alive=parser.should_keep_alive(),
        )

    async def wait_closed(self) -> None:
        """Wait until the client has closed the connection; what it sends meanwhile is kept."""
        with suppress(trio.BrokenResourceError):  # a reset: it is closed, too
            while data := bytes(await self._stream.receive_some(65536)):
                self._pending += data

    def _feed(self, parser: httptools.HttpRequestParser, data: bytes) -> None:
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise NotHttp(str(error)) from error

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._body += data

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._complete = True


def head_of(status: int, headers: Mapping[str, str], *, version: str = "1.1") -> bytes:
    """Status line and headers."""
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Scripted"
    lines = [f"HTTP/{version} {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def reset(stream: trio.abc.Stream) -> None:
    """End the connection with a reset where the stream knows one; elsewhere it is just closed."""
    if isinstance(stream, SimStream):
        stream.reset()
    if isinstance(stream, trio.SocketStream):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(stream)


class _End(enum.Enum):
    """What becomes of the connection after an answer."""

    KEEP = enum.auto()
    """It carries the next request."""
    CLOSE = enum.auto()
    """It is closed."""
    RESET = enum.auto()
    """It is reset."""
    HANG = enum.auto()
    """Nothing more comes, and it stays open."""


@attrs.frozen
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def whole(self, *, body: bytes | None = None, **more: str) -> bytes:
        """Head and body, with the body's length announced; ``body`` is sent in place of the announced one."""
        extra = {name.replace("_", "-"): value for name, value in more.items()}
        head = head_of(self.status, {**self.headers, "content-length": str(len(self.body)), **extra})
        return head + (self.body if body is None else body)

    @property
    def half(self) -> bytes:
        """The answer up to the middle of its body."""
        return self.whole(body=self.body[: len(self.body) // 2])

    def chunked(self, *, ended: bool) -> bytes:
        """The answer in chunks of seven bytes, with extensions and a trailer, or without its end."""
        pieces = [self.body[start : start + 7] for start in range(0, len(self.body), 7)]
        chunks = b"".join(b"%x;note=odd\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        head = head_of(self.status, {**self.headers, "transfer-encoding": "chunked"})
        return head + chunks + (b"0\r\nx-trailer: 1\r\n\r\n" if ended else b"")

    def packed(self) -> bytes:
        """The answer with a compressed body."""
        return attrs.evolve(self, body=gzip.compress(self.body)).whole(content_encoding="gzip")


_Shape: TypeAlias = tuple[Callable[[_Answer], bytes], _End]
_WHOLE: Final[_Shape] = (_Answer.whole, _End.KEEP)
_SHAPES: Final[Mapping[Fault, _Shape]] = {
    Fault.HANG_IN_BODY: (lambda answer: answer.half, _End.HANG),
    Fault.RESET_IN_BODY: (lambda answer: answer.half, _End.RESET),
    Fault.SHORT_BODY: (lambda answer: answer.half, _End.CLOSE),
    Fault.SHORT_CHUNKED: (lambda answer: answer.chunked(ended=False), _End.CLOSE),
    Fault.LONG_BODY: (lambda answer: answer.whole() + b'{"more": 1}', _End.KEEP),
    Fault.CHUNKED: (lambda answer: answer.chunked(ended=True), _End.KEEP),
    Fault.CLOSE_AFTER: (lambda answer: answer.whole(connection="close"), _End.CLOSE),
    Fault.CLOSE_QUIETLY: (lambda answer: answer.whole(), _End.CLOSE),
    Fault.CONTINUE_FIRST: (lambda answer: b"HTTP/1.1 100 Continue\r\n\r\n" + answer.whole(), _End.KEEP),
    Fault.HTTP_1_0: (
        lambda answer: head_of(answer.status, answer.headers, version="1.0") + answer.body,
        _End.CLOSE,
    ),
    Fault.GZIP: (lambda answer: answer.packed(), _End.KEEP),
    Fault.NOT_HTTP: (lambda _: b"-ERR unknown command\r\n\r\n", _End.CLOSE),
}


async def send_answer(
    stream: trio.abc.Stream,
    reader: RequestReader,
    body: bytes,
    fault: Fault | None,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    drip_s: float = 0.0,
) -> bool:
    """Send an answer, damaged as the fault says; whether the connection may carry another request."""
    answer = _Answer(status, {"content-type": "application/json", **(headers or {})}, body)
    if fault is Fault.DRIP:
        for byte in answer.whole():
            await stream.send_all(bytes([byte]))
            await trio.sleep(drip_s)
        return True
    shape, end = _SHAPES.get(fault, _WHOLE) if fault is not None else _WHOLE
    await stream.send_all(shape(answer))
    if end is _End.HANG:
        await reader.wait_closed()
    if end is _End.RESET:
        await reset(stream)
    return end is _End.KEEP
