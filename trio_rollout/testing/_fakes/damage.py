"""Damaged answers: the shapes in which FakeSGLang sends an answer with a fault, and how its connection ends."""

import enum
import gzip
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import attrs
import trio

from ..._http.server import CONTINUE, ServerConnection, answer_head, whole_answer
from .._sim.connection import SimStream
from .plan import Fault


async def reset(stream: trio.abc.Stream) -> None:
    """Reset the connection, or close it if the stream knows no reset."""
    if isinstance(stream, SimStream):
        stream.reset()
    if isinstance(stream, trio.SocketStream):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(stream)


class _End(enum.Enum):
    """The end of a connection after an answer."""

    KEEP = enum.auto()
    """The connection carries the next request."""
    CLOSE = enum.auto()
    """The connection is closed."""
    RESET = enum.auto()
    """The connection is reset."""
    HANG = enum.auto()
    """The connection stays open, and nothing more is sent."""


@attrs.frozen
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def whole(self, *, body: bytes | None = None, **more: str) -> bytes:
        """Return head and body with the body's length announced; ``body`` replaces the announced body."""
        extra = {name.replace("_", "-"): value for name, value in more.items()}
        whole = whole_answer(self.status, self.body, [*self.headers.items(), *extra.items()])
        return whole if body is None else whole[: len(whole) - len(self.body)] + body

    @property
    def half(self) -> bytes:
        """The answer up to the middle of its body."""
        return self.whole(body=self.body[: len(self.body) // 2])

    def chunked(self, *, ended: bool) -> bytes:
        """Return the answer in chunks of seven bytes, with extensions and a trailer, or without its end."""
        pieces = [self.body[start : start + 7] for start in range(0, len(self.body), 7)]
        chunks = b"".join(b"%x;note=odd\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        head = answer_head(self.status, [*self.headers.items(), ("transfer-encoding", "chunked")])
        return head + chunks + (b"0\r\nx-trailer: 1\r\n\r\n" if ended else b"")

    def packed(self) -> bytes:
        """Return the answer with a compressed body."""
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
    Fault.CONTINUE_FIRST: (lambda answer: CONTINUE + answer.whole(), _End.KEEP),
    Fault.HTTP_1_0: (
        lambda answer: answer_head(answer.status, answer.headers.items(), version="1.0") + answer.body,
        _End.CLOSE,
    ),
    Fault.GZIP: (lambda answer: answer.packed(), _End.KEEP),
    Fault.NOT_HTTP: (lambda _: b"-ERR unknown command\r\n\r\n", _End.CLOSE),
}


async def send_answer(
    connection: ServerConnection,
    body: bytes,
    fault: Fault | None,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    drip_s: float = 0.0,
) -> None:
    """Send an answer, damaged by the fault, and end the connection if the fault does."""
    answer = _Answer(status, {"content-type": "application/json", **(headers or {})}, body)
    if fault is Fault.DRIP:
        for byte in answer.whole():
            await connection.stream.send_all(bytes([byte]))
            await trio.sleep(drip_s)
        return
    shape, end = _SHAPES.get(fault, _WHOLE) if fault is not None else _WHOLE
    await connection.stream.send_all(shape(answer))
    if end is _End.KEEP:
        return
    connection.keep_open = False
    if end is _End.HANG:
        await connection.gone.wait()
    if end is _End.RESET:
        await reset(connection.stream)
