"""A network in memory: what the client of servers calls a connection on one side, a Trio stream on the other.

For virtual time, which real sockets can't share. Everything else stays as it is: the pool, the parser and the server see the
bytes they would see. Give its ``connect`` to ``open_sglang_servers`` and let it route to ``FakeSGLang.serve``::

    async with open_memory_net({"http://a:1": fake.serve}) as net, open_sglang_servers(["http://a:1"], connect=net.connect):
"""

import errno
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias, final

import attrs
import trio

from .._backoff import wait_s
from .._service import open_service
from ..sglang._http import Address

Handler: TypeAlias = Callable[[trio.abc.Stream], Awaitable[None]]
"""Serves one connection until it ends."""

# What a socket's buffers would take: large requests are sent in several pieces here, too.
_CAPACITY = 65536


@final
@attrs.define(eq=False, repr=False)
class _Pipe:
    """One direction: bytes that were sent and not yet received."""

    data: bytearray = attrs.field(factory=bytearray)
    ended: bool = False
    """The sender has closed: after the data comes the end."""
    refused: bool = False
    """The receiver has closed: nothing more is taken."""
    broken: bool = False
    """The connection was reset: neither side gets anything more."""
    moved: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def readable(self) -> bool:
        return bool(self.data) or self.ended or self.broken

    @property
    def writable(self) -> bool:
        return len(self.data) < _CAPACITY or self.refused or self.broken

    async def wait(self, condition: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
        while not condition():
            await self.moved.park()

    def put(self, data: bytes | bytearray | memoryview) -> int:
        if self.refused or self.broken:
            raise BrokenPipeError(errno.EPIPE, "the other side has closed")
        taken = min(len(data), _CAPACITY - len(self.data))
        self.data += data[:taken]
        self.moved.unpark_all()
        return taken

    def take(self, count: int) -> bytes | None:
        if self.broken:
            raise ConnectionResetError(errno.ECONNRESET, "reset by the other side")
        if not self.data:
            return b"" if self.ended else None
        taken = bytes(self.data[:count])
        del self.data[:count]
        self.moved.unpark_all()
        return taken

    def set(self, **flags: bool) -> None:
        for name, value in flags.items():
            setattr(self, name, value)
        self.moved.unpark_all()


@final
@attrs.define(eq=False, repr=False)
class MemoryConnection:
    """The client's side: the port of five calls."""

    _outward: _Pipe
    _inward: _Pipe

    def send_now(self, data: bytes | memoryview, /) -> int:
        """Bytes taken without waiting."""
        return self._outward.put(data)

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        """Bytes put into ``buffer``; 0 at the end, None if there is nothing yet."""
        data = self._inward.take(len(buffer))
        if data is None:
            return None
        buffer[: len(data)] = data
        return len(data)

    async def wait_readable(self) -> None:
        """Wait until there is something to receive."""
        await self._inward.wait(lambda: self._inward.readable)

    async def wait_writable(self) -> None:
        """Wait until something can be sent."""
        await self._outward.wait(lambda: self._outward.writable)

    def close(self) -> None:
        """Close it: the server reads the end, and can't send any more."""
        self._outward.set(ended=True)
        self._inward.set(refused=True)


@final
@attrs.define(eq=False, repr=False)
class MemoryStream(trio.abc.Stream):
    """The server's side: a Trio stream that can also be reset."""

    _outward: _Pipe
    _inward: _Pipe
    _closed: bool = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything; waits while the client takes nothing."""
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest:
            if self._closed:
                raise trio.ClosedResourceError
            try:
                rest = rest[self._outward.put(rest) :]
            except OSError as error:
                raise trio.BrokenResourceError from error
            if len(rest):
                await self.wait_send_all_might_not_block()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until something can be sent."""
        await self._outward.wait(lambda: self._outward.writable)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive what is there, at least one byte; empty at the end."""
        await self._inward.wait(lambda: self._inward.readable or self._closed)
        if self._closed:
            raise trio.ClosedResourceError
        try:
            return self._inward.take(max_bytes or _CAPACITY) or b""
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def aclose(self) -> None:
        """Close it: the client reads what was sent, then the end."""
        self._closed = True
        self._outward.set(ended=True)
        self._inward.set(refused=True)
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Reset it: what was sent and not yet received is lost."""
        self._outward.set(broken=True)
        self._inward.set(broken=True)


@final
@attrs.define(eq=False, repr=False)
class MemoryNet:
    """Hosts by URL. ``hosts`` may be changed at any time; what isn't there refuses connections.

    ``latency()`` is how many seconds one connect takes.
    """

    hosts: dict[str, Handler]
    latency: Callable[[], float]
    _nursery: trio.Nursery

    async def connect(self, address: Address) -> MemoryConnection:
        """Connect to a host, as ``open_sglang_servers(connect=...)`` wants it."""
        await wait_s(self.latency())
        handler = self.hosts.get(address.url)
        if handler is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        there, back = _Pipe(), _Pipe()
        self._nursery.start_soon(handler, MemoryStream(back, there), name=f"connection to {address.url}")
        return MemoryConnection(there, back)


async def leave_at_once(_value: object, _error: BaseException | None) -> None:
    """For ``open_service``: nothing has to be done before the service is cancelled."""
    await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_memory_net(
    hosts: Mapping[str, Handler], *, latency: Callable[[], float] = lambda: 0.0
) -> AsyncGenerator[MemoryNet]:
    """A network of these hosts, each a function that serves one connection. Leaving cancels every connection's server."""

    async def serve(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()

    async with open_service(serve, leave_at_once) as nursery:
        yield MemoryNet(dict(hosts), latency, nursery)
