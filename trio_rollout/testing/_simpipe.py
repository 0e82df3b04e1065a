"""One direction of a simulated connection: bytes on their way, each piece with the time at which it arrives.

There is no task behind it: a piece is readable once its time has come, and whoever waits, waits for that time. What one
side does to the other (an end, a reset) travels in the same way.
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

from .._signal import StateChange
from ._simlink import Link

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
        self._changed = StateChange()
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
