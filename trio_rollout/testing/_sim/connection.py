"""A simulated connection: the client's end is the port of five calls, the server's end a Trio stream.

``Link`` and ``NetFaults`` are the settings of a network. A connection is a ``Wire`` of two ``Pipe``s, one for each direction. A
pipe holds bytes in transit, each piece with the time at which it arrives. No task moves them: a piece is readable once its
time has come, and a reader waits for that time. Ends and resets travel in the same way.
"""

import errno
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import final

import attrs
import trio

from ..._util.condition import Condition

_RANGE = attrs.validators.deep_iterable(attrs.validators.ge(0.0))
_SHARE = attrs.validators.and_(attrs.validators.ge(0.0), attrs.validators.le(1.0))


@attrs.frozen(kw_only=True)
class Link:
    """Settings of every connection of a network.

    ``latency``: least and longest seconds in transit, drawn for each piece; the order is kept. ``window``: bytes that are
    taken before the other side has received any. ``split``: the share of sends and receives that move less than they could.
    """

    latency: tuple[float, float] = attrs.field(default=(0.0002, 0.02), validator=_RANGE)
    window: int = attrs.field(default=65536, validator=attrs.validators.ge(1))
    split: float = attrs.field(default=0.2, validator=_SHARE)


@attrs.frozen(kw_only=True)
class NetFaults:
    """Shares of the connections that get a fault, drawn from the network's seed.

    ``refused``: the connect fails. ``unanswered``: the connect is never answered. ``reset``, ``silent``: after up to
    ``within`` bytes the connection is reset, or carries nothing more while both sides believe that it is open.
    """

    refused: float = attrs.field(default=0.0, validator=_SHARE)
    unanswered: float = attrs.field(default=0.0, validator=_SHARE)
    reset: float = attrs.field(default=0.0, validator=_SHARE)
    silent: float = attrs.field(default=0.0, validator=_SHARE)
    within: int = attrs.field(default=4096, validator=attrs.validators.ge(1))


NEVER = math.inf


@final
@attrs.define(eq=False)
class _News:
    """An event on a pipe, and the time at which one side learns of it."""

    happened: bool = False
    at: float = NEVER

    def tell(self, at: float) -> None:
        self.happened = True
        self.at = min(self.at, at)

    def known(self) -> bool:
        return self.at <= trio.current_time()

    def cut(self) -> None:
        self.at = self.at if self.known() else NEVER

    def mend(self, at: float) -> None:
        if self.happened and self.at == NEVER:
            self.at = at


@final
class Pipe:
    """One direction of a connection: bytes from a writer to a reader."""

    def __init__(self, link: Link, rng: random.Random, events: Counter[str]) -> None:
        self._link = link
        self._rng = rng
        self._events = events
        self._flying: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._last = 0.0
        self._cut = False
        self._changed = Condition()
        self._end = _News()  # for the reader: no more bytes
        self._left = _News()  # for the writer: the reader has closed
        self._reset_reader = _News()
        self._reset_writer = _News()
        self._news = (self._end, self._left, self._reset_reader, self._reset_writer)

    def put(self, data: bytes | bytearray | memoryview) -> int:
        """Take as many bytes as there is room for, sometimes fewer, and return their number; 0 if there is no room."""
        if self._reset_writer.known():
            raise ConnectionResetError(errno.ECONNRESET, "reset by the other side")
        if self._left.known() or self._end.happened:
            raise BrokenPipeError(errno.EPIPE, "the other side has closed")
        room = min(self._link.window - self._size, len(data))
        if room > 1 and self._rng.random() < self._link.split:
            room = self._rng.randint(1, room)
            self._events["partial send"] += 1
        if room <= 0:
            return 0
        if not self._left.happened:  # otherwise the reader's system discards it
            self._flying.append((self._arrival(), bytes(data[:room])))
            self._size += room
        self._changed.notify()
        return room

    def end(self) -> None:
        """End the stream: the reader gets the end after the bytes in transit."""
        if not self._end.happened:
            self._end.tell(self._arrival())
            self._changed.notify()

    def writable_at(self) -> float:
        """Return the time at which ``put`` takes a byte or raises, as far as it is known."""
        if self._size < self._link.window or self._end.happened:
            return trio.current_time()
        return min(self._left.at, self._reset_writer.at)

    def take(self, buffer: bytearray | memoryview) -> int | None:
        """Receive the bytes that have arrived, sometimes only a part; 0 at the end, None if there is nothing yet."""
        if self._reset_reader.known():
            raise ConnectionResetError(errno.ECONNRESET, "reset by the other side")
        now, count = trio.current_time(), 0
        while self._flying and self._flying[0][0] <= now and count < len(buffer):
            at, piece = self._flying.popleft()
            part = piece[: len(buffer) - count]
            buffer[count : count + len(part)] = part
            count += len(part)
            if len(part) < len(piece):
                self._flying.appendleft((at, piece[len(part) :]))
            elif self._rng.random() < self._link.split:
                break
        if count:
            self._size -= count
            self._changed.notify()
            return count
        return 0 if not self._flying and self._end.known() else None

    def readable_at(self) -> float:
        """Return the time at which ``take`` returns something or raises, as far as it is known."""
        return min(self._flying[0][0] if self._flying else self._end.at, self._reset_reader.at)

    def leave(self) -> bool:
        """Close the reader's side; the writer learns of it later. Return True if bytes were discarded unread."""
        unread = bool(self._flying)
        self._left.tell(self._later())
        self._flying.clear()
        self._size = 0
        self._changed.notify()
        return unread

    def reset(self, *, by_writer: bool) -> None:
        """Reset the pipe: at once for the side that does it, later for the other side."""
        now, later = trio.current_time(), self._later()
        self._reset_writer.tell(now if by_writer else later)
        self._reset_reader.tell(later if by_writer else now)
        self._changed.notify()

    def cut(self) -> None:
        """Let nothing arrive from now on, without telling either side. Bytes that had arrived can still be read."""
        now = trio.current_time()
        self._cut = True
        self._flying = deque((at if at <= now else NEVER, piece) for at, piece in self._flying)
        for news in self._news:
            news.cut()
        self._changed.notify()

    def mend(self) -> None:
        """Let things arrive again, those held up included."""
        self._cut = False
        self._flying = deque((self._arrival() if at == NEVER else at, piece) for at, piece in self._flying)
        for news in self._news:
            news.mend(self._arrival())
        self._changed.notify()

    def forget(self) -> None:
        """Let things arrive again, without those held up: the other machine has restarted."""
        self._cut = False
        self._flying.clear()
        self._size = 0
        self._changed.notify()

    async def wait(self, at: Callable[[], float]) -> None:
        """Wait until the time ``at()`` has come; always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while (then := at()) > trio.current_time():
            with trio.CancelScope(deadline=then):
                await self._changed.wait_until(partial(_differs, at, then))

    def _later(self) -> float:
        return NEVER if self._cut else trio.current_time() + self._rng.uniform(*self._link.latency)

    def _arrival(self) -> float:
        """Return the time at which bytes sent now arrive: never before those sent earlier."""
        if self._cut:
            return NEVER
        self._last = max(self._last, self._later())
        return self._last


def _differs(at: Callable[[], float], then: float) -> bool:
    return at() != then


_CHUNK = 65536


@final
@attrs.frozen
class PlannedFault:
    """A fault of a connection, after this many bytes in both directions together."""

    kind: str
    """``reset``, ``silent``, or empty for none."""
    after: int


@final
class Wire:
    """Both directions of one connection, and the faults that hit both."""

    def __init__(
        self,
        link: Link,
        rng: random.Random,
        events: Counter[str],
        fault: PlannedFault,
        gone: Callable[["Wire"], object],
    ) -> None:
        self.up: Pipe = Pipe(link, rng, events)
        self.down: Pipe = Pipe(link, rng, events)
        self.client_open: bool = True
        self.server_lost: bool = False
        """The server's machine has lost its power since the connect: it does not know this connection."""
        self._events = events
        self._fault = fault
        self._bytes = 0
        self._gone = gone
        self._ends_open = 2
        self._answers = True
        self._unanswered = False

    def ends(self) -> tuple["End", "End"]:
        """Return the client's end and the server's."""
        return End(self, self.up, self.down), End(self, self.down, self.up)

    def moved(self, count: int) -> None:
        """Count bytes, and apply the planned fault when it is due."""
        before, self._bytes = self._bytes, self._bytes + count
        if before < self._fault.after <= self._bytes and self._fault.kind:
            self._events[self._fault.kind] += 1
            if self._fault.kind == "reset":
                self.reset_both()
            else:
                self.cut()
        if self.server_lost:
            self._unanswered = True
            self._refuse()

    def reset(self, outgoing: Pipe) -> None:
        """Reset the connection from the side that writes to ``outgoing``."""
        for pipe in (self.up, self.down):
            pipe.reset(by_writer=pipe is outgoing)

    def reset_both(self) -> None:
        """Reset the connection from both sides."""
        self.reset(self.up)
        self.reset(self.down)

    def cut(self) -> None:
        """Let nothing arrive any more, on either side."""
        self.up.cut()
        self.down.cut()

    def mend(self) -> None:
        """Let things arrive again."""
        self.up.mend()
        self.down.mend()

    def lose_server(self) -> None:
        """Take the server's machine off power: no end and no reset is sent."""
        self.server_lost, self._answers = True, False
        self.cut()

    def server_restarted(self) -> None:
        """Bring the machine back: bytes from the client are answered with a reset, those sent meanwhile too."""
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
        """Note that an end was closed; when both are, the wire is gone."""
        self.client_open = self.client_open and not client
        self._ends_open -= 1
        if not self._ends_open:
            self._gone(self)


@final
@attrs.define(eq=False, repr=False)
class End:
    """One end of a wire. The client's end stands in for a socket (``_http.Connection``)."""

    _wire: Wire
    _outgoing: Pipe
    _incoming: Pipe
    closed: bool = attrs.field(default=False, init=False)
    ended: bool = attrs.field(default=False, init=False)
    """True once ``send_eof`` was called."""

    def _require_open(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "this end of the connection was closed")

    def send_now(self, data: bytes | bytearray | memoryview, /) -> int:
        """Send without waiting; return the number of bytes taken."""
        self._require_open()
        count = self._outgoing.put(data)
        self._wire.moved(count)
        return count

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        """Receive into ``buffer``; return the number of bytes, 0 at the end, None if there is nothing yet."""
        self._require_open()
        return self._incoming.take(buffer)

    async def wait_readable(self) -> None:
        """Wait until ``recv_into_now`` would not return None."""
        await self._wait(self._incoming, self._incoming.readable_at)

    async def wait_writable(self) -> None:
        """Wait until ``send_now`` takes a byte or raises."""
        await self._wait(self._outgoing, self._outgoing.writable_at)

    async def _wait(self, pipe: Pipe, at: Callable[[], float]) -> None:
        await pipe.wait(lambda: trio.current_time() if self.closed else at())
        if self.closed:
            raise trio.ClosedResourceError

    def send_eof(self) -> None:
        """End the outgoing direction only."""
        self.ended = True
        self._outgoing.end()

    def close(self) -> None:
        """Close this end. As in TCP, unread bytes turn the close into a reset."""
        if self.closed:
            return
        self.closed = True
        client = self._outgoing is self._wire.up
        if client or not self._wire.server_lost:
            self._outgoing.end()
            if self._incoming.leave():
                self._wire.reset(self._outgoing)
        self._wire.end_closed(client=client)

    def reset(self) -> None:
        """Close this end by a reset: bytes in transit are lost."""
        if not self.closed:
            self._wire.reset(self._outgoing)
            self.close()


@final
@attrs.define(eq=False)
class _OneAtATime:
    """Refuses a second task, as Trio's streams do."""

    _doing: str
    _busy: bool = attrs.field(default=False, init=False)

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(f"another task is already {self._doing} this stream")
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False


@final
class SimStream(trio.abc.HalfCloseableStream):
    """The server's end as a Trio stream. ``reset()`` ends it as a crash of the process does."""

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
            raise AssertionError("readable, but nothing was there: another task reads from this end")
        return bytes(buffer[:count])

    async def send_eof(self) -> None:
        """End the outgoing direction; the other one stays open."""
        with self._sending:
            await trio.lowlevel.checkpoint()
            if self._end.closed:
                raise trio.ClosedResourceError
            self._end.send_eof()

    async def aclose(self) -> None:
        """Close the stream."""
        self._end.close()
        await trio.lowlevel.checkpoint()

    def close_now(self) -> None:
        """Close the stream without a checkpoint."""
        self._end.close()

    def reset(self) -> None:
        """Close the stream by a reset: the other side gets an error and loses the bytes in transit."""
        self._end.reset()
