"""A simulated connection: the client's end is the port of five calls, the server's end a Trio stream."""

import errno
import random
from collections import Counter
from collections.abc import Callable
from typing import final

import attrs
import trio

from ._simlink import Link
from ._simpipe import Pipe

_CHUNK = 65536


@final
@attrs.frozen
class Fate:
    """What will go wrong with a connection, after so many bytes in both directions together."""

    kind: str
    """``reset``, ``silent`` or nothing."""
    after: int


@final
class Wire:
    """Both directions of one connection, and what hits them together."""

    def __init__(
        self, link: Link, rng: random.Random, events: Counter[str], fate: Fate, gone: Callable[["Wire"], None]
    ) -> None:
        self.up: Pipe = Pipe(link, rng, events)
        self.down: Pipe = Pipe(link, rng, events)
        self.client_open: bool = True
        self.server_lost: bool = False
        """The server's machine has no power, or has had none since: it knows nothing of this connection."""
        self._events = events
        self._fate = fate
        self._bytes = 0
        self._gone = gone
        self._ends_open = 2
        self._answers = True
        self._unanswered = False

    def ends(self) -> tuple["End", "End"]:
        """The client's end, and the server's."""
        return End(self, self.up, self.down), End(self, self.down, self.up)

    def moved(self, count: int) -> None:
        """Count bytes, and let happen what was due after so many."""
        before, self._bytes = self._bytes, self._bytes + count
        if before < self._fate.after <= self._bytes and self._fate.kind:
            self._events[self._fate.kind] += 1
            if self._fate.kind == "reset":
                self.reset(self.up)
                self.reset(self.down)
            else:
                self.cut()
        if self.server_lost:
            self._unanswered = True
            self._refuse()

    def reset(self, outgoing: Pipe) -> None:
        """Reset by the side that writes to ``outgoing``."""
        for pipe in (self.up, self.down):
            pipe.reset(by_writer=pipe is outgoing)

    def cut(self) -> None:
        """Nothing arrives any more, on either side."""
        self.up.cut()
        self.down.cut()

    def mend(self) -> None:
        """Things arrive again."""
        self.up.mend()
        self.down.mend()

    def lose_server(self) -> None:
        """The server's machine loses its power: no end and no reset is sent."""
        self.server_lost, self._answers = True, False
        self.cut()

    def server_restarted(self) -> None:
        """The machine is back: what the client sends is answered with a reset, also what it had sent meanwhile."""
        if not self._answers:
            self._answers = True
            self.up.forget()
            self.down.forget()
            self._refuse()

    def _refuse(self) -> None:
        if self._answers and self._unanswered:
            self._events["reset"] += 1
            self.reset(self.down)

    def end_closed(self, *, client: bool) -> None:
        """One end was closed; with the second one the wire is gone."""
        self.client_open = self.client_open and not client
        self._ends_open -= 1
        if not self._ends_open:
            self._gone(self)


@final
class End:
    """One end of a wire; the client's is what its pool takes for a socket (``sglang._http.Connection``)."""

    def __init__(self, wire: Wire, outgoing: Pipe, incoming: Pipe) -> None:
        self._wire = wire
        self._out = outgoing
        self._in = incoming
        self.closed: bool = False
        self.ended: bool = False
        """``send_eof`` was called."""

    def _require_open(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "this end of the connection was closed")

    def send_now(self, data: bytes | bytearray | memoryview, /) -> int:
        """Bytes taken without waiting."""
        self._require_open()
        count = self._out.put(data)
        self._wire.moved(count)
        return count

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        """Bytes put into ``buffer``; 0 at the end, None if there is nothing yet."""
        self._require_open()
        return self._in.take(buffer)

    async def wait_readable(self) -> None:
        """Wait until ``recv_into_now`` has an answer."""
        await self._wait(self._in, self._in.readable_at)

    async def wait_writable(self) -> None:
        """Wait until ``send_now`` takes a byte or raises."""
        await self._wait(self._out, self._out.writable_at)

    async def _wait(self, pipe: Pipe, at: Callable[[], float]) -> None:
        await pipe.wait(lambda: trio.current_time() if self.closed else at())
        if self.closed:
            raise trio.ClosedResourceError

    def send_eof(self) -> None:
        """End the outgoing direction only."""
        self.ended = True
        self._out.end()

    def close(self) -> None:
        """Close it. As TCP does it, bytes that were not read make it a reset."""
        if self.closed:
            return
        self.closed = True
        client = self._out is self._wire.up
        if client or not self._wire.server_lost:
            self._out.end()
            if self._in.leave():
                self._wire.reset(self._out)
        self._wire.end_closed(client=client)

    def reset(self) -> None:
        """Close it by a reset: what is on its way is lost."""
        if not self.closed:
            self._wire.reset(self._out)
            self.close()


@final
class _OneAtATime:
    """Refuses a second task, as Trio's own streams do."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(f"another task is already {self._doing} this stream")
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False


@final
class SimStream(trio.abc.HalfCloseableStream):
    """The server's end as a Trio stream. ``reset()`` ends it as a crashed process would."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._sending = _OneAtATime("sending on")
        self._receiving = _OneAtATime("receiving from")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything. Blocks while the other side takes nothing; **cancelled, some of it may have been sent.**"""
        with self._sending:
            rest = memoryview(data)
            await trio.lowlevel.checkpoint()
            if self._end.closed or self._end.ended:
                raise trio.ClosedResourceError
            while rest:
                await self._end.wait_writable()
                try:
                    rest = rest[self._end.send_now(rest) :]
                except OSError as error:
                    raise trio.BrokenResourceError from error

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until something can be sent."""
        with self._sending:
            await self._end.wait_writable()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive at least one byte; empty at the end."""
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"receive_some: max_bytes must be at least 1, got {max_bytes}")
        buffer = bytearray(_CHUNK if max_bytes is None else max_bytes)
        with self._receiving:
            await self._end.wait_readable()
            try:
                count = self._end.recv_into_now(buffer)
            except OSError as error:
                raise trio.BrokenResourceError from error
        if count is None:
            raise AssertionError("readable, but nothing was there: somebody else reads from this end")
        return bytes(buffer[:count])

    async def send_eof(self) -> None:
        """End the outgoing direction; the other one stays open."""
        with self._sending:
            await trio.lowlevel.checkpoint()
            if self._end.closed:
                raise trio.ClosedResourceError
            self._end.send_eof()

    async def aclose(self) -> None:
        """Close it."""
        self._end.close()
        await trio.lowlevel.checkpoint()

    def close_now(self) -> None:
        """Close it without a checkpoint."""
        self._end.close()

    def reset(self) -> None:
        """Close it by a reset: the other side gets an error, and loses what is on its way."""
        self._end.reset()
