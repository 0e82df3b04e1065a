"""How a simulated network behaves: delays, sizes, and what goes wrong how often. Values only.

One direction of a simulated connection: bytes on their way, each piece with the time at which it arrives.

There is no task behind it: a piece is readable once its time has come, and whoever waits, waits for that time. What one
side does to the other (an end, a reset) travels in the same way.

A simulated connection: the client's end is the port of five calls, the server's end a Trio stream.
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
    """Every connection of a network.

    ``latency``: least and longest seconds on the way, drawn for each piece; the order stays. ``window``: bytes that are taken
    before the other side has received any. ``split``: how often a send or a receive moves less than it could.
    """

    latency: tuple[float, float] = attrs.field(default=(0.0002, 0.02), validator=_RANGE)
    window: int = attrs.field(default=65536, validator=attrs.validators.ge(1))
    split: float = attrs.field(default=0.2, validator=_SHARE)


@attrs.frozen(kw_only=True)
class NetFaults:
    """The share of connections, drawn from the network's seed, to which each of these happens.

    ``refused``: the connect fails. ``unanswered``: the connect is never answered. ``reset``, ``silent``: after up to
    ``within`` bytes the connection is reset, or carries nothing more while both sides take it for open.
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
    """Something that happened to a pipe, and when one side learns of it."""

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
    """Bytes from a writer to a reader."""

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

    def put(self, data: bytes | bytearray | memoryview) -> int:
        """Take as many bytes as there is room for, sometimes fewer; 0 if there is no room."""
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
        if not self._left.happened:  # else the reader's system throws it away
            self._flying.append((self._arrival(), bytes(data[:room])))
            self._size += room
        self._changed.notify()
        return room

    def end(self) -> None:
        """No more bytes: the reader gets the end after those on their way."""
        if not self._end.happened:
            self._end.tell(self._arrival())
            self._changed.notify()

    def writable_at(self) -> float:
        """When ``put`` next takes a byte or raises, as far as is known."""
        if self._size < self._link.window or self._end.happened:
            return trio.current_time()
        return min(self._left.at, self._reset_writer.at)

    def take(self, buffer: bytearray | memoryview) -> int | None:
        """Receive what has arrived, sometimes only a part of it; 0 at the end, None if there is nothing yet."""
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
        """When ``take`` next returns something or raises, as far as is known."""
        return min(self._flying[0][0] if self._flying else self._end.at, self._reset_reader.at)

    def leave(self) -> bool:
        """The reader closes; the writer learns of it later. Whether bytes were thrown away unread."""
        unread = bool(self._flying)
        self._left.tell(self._later())
        self._flying.clear()
        self._size = 0
        self._changed.notify()
        return unread

    def reset(self, *, by_writer: bool) -> None:
        """End it with an error: at once for the side that does it, later for the other one."""
        now, later = trio.current_time(), self._later()
        self._reset_writer.tell(now if by_writer else later)
        self._reset_reader.tell(later if by_writer else now)
        self._changed.notify()

    def cut(self) -> None:
        """From now on nothing arrives, and neither side is told. What had arrived can still be read."""
        now = trio.current_time()
        self._cut = True
        self._flying = deque((at if at <= now else NEVER, piece) for at, piece in self._flying)
        for news in (self._end, self._left, self._reset_reader, self._reset_writer):
            news.cut()
        self._changed.notify()

    def mend(self) -> None:
        """Things arrive again, and what was held up as well."""
        self._cut = False
        self._flying = deque((self._arrival() if at == NEVER else at, piece) for at, piece in self._flying)
        for news in (self._end, self._left, self._reset_reader, self._reset_writer):
            news.mend(self._arrival())
        self._changed.notify()

    def forget(self) -> None:
        """Things arrive again, but nothing of what was held up: the other machine has restarted."""
        self._cut = False
        self._flying.clear()
        self._size = 0
        self._changed.notify()

    async def wait(self, at: Callable[[], float]) -> None:
        """Wait until the time that ``at()`` names has come; always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while (then := at()) > trio.current_time():
            with trio.CancelScope(deadline=then):
                await self._changed.wait_until(partial(_differs, at, then))

    def _later(self) -> float:
        return NEVER if self._cut else trio.current_time() + self._rng.uniform(*self._link.latency)

    def _arrival(self) -> float:
        """When what is sent now arrives: never before what was sent earlier."""
        if self._cut:
            return NEVER
        self._last = max(self._last, self._later())
        return self._last


def _differs(at: Callable[[], float], then: float) -> bool:
    return at() != then


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
