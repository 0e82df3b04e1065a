"""The gate between rollouts and servers: closed while weights change.

Owns the permission to send requests, the scopes of the turns under way, and the clocks of their time limits. Opening is
paced: all waiters are let through, a bounded number per tick of the event loop, because 2,000 requests that are encoded in
one tick stall everything else.

**The clocks** (docs/decisions/0027-clocks-stand-still-while-no-server-takes-requests.md). Two limits say how long an answer may take: ``Deadlines.turn`` for a call, and
``Deadlines.no_progress`` for the time without a new token. A paused server cannot answer in time, and a request that cannot
be sent cannot be answered, so both stand still meanwhile; the group's deadline, which is wall-clock time over everything,
runs on. Two things stop a clock: the gate, while it is closed, and a request that waits for a server because all of them
are lost or busy (``Clock.stopped``). They overlap, in either order: a window opens while a request waits for a server, or
the wait begins inside a window, or a clock is started while the gate is closed. So a clock counts its holders. The first
``stop`` moves the deadline of the scope to infinity and keeps the time that was left; the last ``go`` sets the deadline
again. A reset while the clock stands still replaces the time that is left.

A rollout has one idle timer for all its turns, and each turn has a clock. A turn that waits for a server stops both, the
idle timer as ``beside``. Two turns of a rollout may wait at once, so the idle timer may have two holders, and it goes on
when both have their server.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeGuard, final

import attrs
import trio

from .._util.condition import Condition
from ._wakeups import WakeUps

# A tick that sends 64 requests takes about 10 ms (0.15 ms of CPU each, with 512 ids): the loop stays responsive.
WAKE_PER_TICK = 64


@attrs.define(eq=False)
class Clock:
    """A time limit on a ``with`` block that can stand still; the block is cancelled when the time is used up.

    ``beside``: another clock, which stands still whenever this one waits for a server.
    """

    gate: "Gate"
    limit: float
    beside: "Clock | None" = None
    scope: trio.CancelScope = attrs.field(init=False)
    _remaining: float | None = attrs.field(default=None, init=False)
    _holders: int = attrs.field(default=0, init=False)

    def __enter__(self) -> Self:
        # A deadline from the start: each change of one costs a twentieth of a small rollout.
        self.scope = trio.CancelScope(deadline=trio.current_time() + self.limit)
        if not self.gate.is_open:
            self.stop()
        self.gate._clocks[self] = None
        self.scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        del self.gate._clocks[self]
        return self.scope.__exit__(kind, error, trace)

    def reset(self) -> None:
        """Start the whole time limit again."""
        if self.limit == math.inf:
            return
        if self._remaining is None:
            self.scope.deadline = trio.current_time() + self.limit
        else:
            self._remaining = self.limit

    def stop(self) -> None:
        """Stand still until ``go`` has been called as often as ``stop``."""
        self._holders += 1
        if self._remaining is None:
            self._remaining = self.scope.deadline - trio.current_time()
            self.scope.deadline = math.inf

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Stand still for the block, and stop the clock beside, too."""
        held = [self] if self.beside is None else [self, self.beside]
        for clock in held:
            clock.stop()
        try:
            yield
        finally:
            for clock in held:
                clock.go()

    def go(self) -> None:
        """Go on with the time that was left, unless another holder stops the clock."""
        self._holders -= 1
        if self._remaining is not None and not self._holders:
            self.scope.deadline = trio.current_time() + self._remaining
            self._remaining = None


@final
@attrs.define(eq=False)
class GateTicket(Clock):
    """One turn under way: ``epoch`` is the gate's when it began; ``interrupted``, a window gave up its call."""

    epoch: int = 0
    interrupted: bool = False

    def __enter__(self) -> Self:
        self.gate._inside[self] = None
        Clock.__enter__(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        del self.gate._inside[self]
        self.gate._left.notify()
        return Clock.__exit__(self, kind, error, trace)


@final
@attrs.define(eq=False, repr=False)
class Gate:
    """Open or closed. ``epoch`` counts the closings; ``version`` is the newest weight version.

    It is closed while weights change (``changing``), and before the first ones have come if it ``awaits_weights``.
    """

    wake: WakeUps = attrs.field(factory=WakeUps)
    is_open: bool = attrs.field(default=True, init=False)
    changing: bool = attrs.field(default=False, init=False)
    awaits_weights: bool = attrs.field(default=False, init=False)
    epoch: int = attrs.field(default=0, init=False)
    version: int = attrs.field(default=0, init=False)
    _left: Condition = attrs.field(factory=Condition, init=False)
    _outside: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _inside: dict[GateTicket, None] = attrs.field(factory=dict, init=False)
    _clocks: dict[Clock, None] = attrs.field(factory=dict, init=False)

    @property
    def calls(self) -> int:
        """The number of turns under way on a server."""
        return len(self._inside)

    async def until_fewer_calls(self, than: int) -> None:
        """Wait until fewer turns than ``than`` are under way on a server. Cancelled, nothing has changed."""
        await self._left.wait_until(lambda: len(self._inside) < than)

    async def until_calls_end(self, have_ended: Callable[[], bool]) -> None:
        """Wait until certain turns have left their servers. Cancelled, nothing has changed."""
        await self._left.wait_until(have_ended)

    def adopt(self, version: int, *, awaits_weights: bool = False) -> None:
        """Make this the newest weight version. ``awaits_weights``: it is not to be used, so stay closed until the next."""
        self.version = version
        self.awaits_weights = awaits_weights
        if awaits_weights:
            self.is_open = False
        self.wake.notify()

    async def wait(self) -> None:
        """Wait until requests may be sent. Cancelled, nothing has changed."""
        while not self.is_open:
            await self._outside.park()

    # Not generators: at two a rollout those were a twentieth of its cost.
    def turn(self, seconds: float | None, *, beside: Clock | None = None) -> GateTicket:
        """Return the ticket of one turn, for a ``with`` block that may take ``seconds`` while the clock runs."""
        return GateTicket(self, limit_of(seconds), beside, epoch=self.epoch)

    def clock(self, seconds: float | None) -> Clock:
        """Return a time limit for a ``with`` block, an idle timer: the caller resets it with each progress."""
        return Clock(self, limit_of(seconds))

    def close(self) -> None:
        """Let no request through, and stop the clocks of the turns under way."""
        if self.is_open:
            for clock in self._clocks:
                clock.stop()
        self.is_open, self.changing = False, True
        self.epoch += 1
        self.wake.consumers.notify()

    async def open(self) -> None:
        """Let requests through, unless the first weights have not come yet.

        Blocks until all waiters were woken; cancelled, the rest are woken at once.
        """
        self.changing = False
        if self.awaits_weights or self.is_open:
            self.wake.consumers.notify()
            await trio.lowlevel.checkpoint()
            return
        self.is_open = True
        for clock in self._clocks:
            clock.go()
        try:
            while self._outside:
                self._outside.unpark(count=WAKE_PER_TICK)
                await trio.lowlevel.checkpoint()
        finally:
            if self.is_open:
                self._outside.unpark_all()
            self.wake.admission.notify()

    def interrupt_calls(self) -> None:
        """Cancel the calls that are still under way, and not their tries."""
        for ticket in self._inside:
            ticket.interrupted = True
            ticket.scope.cancel(reason="weight update")


def ignore_progress() -> None:
    """Stand in for the reset of an idle timer where there is none: for streamed tokens, and for the output of tools."""


def is_limit(seconds: float | None) -> TypeGuard[float]:
    """Return True if this setting limits a time: None, zero, negative numbers and infinity do not."""
    return seconds is not None and 0 < seconds < math.inf


def limit_of(seconds: float | None) -> float:
    """Return a time limit in seconds; infinite for None, zero and negative numbers."""
    return math.inf if seconds is None or seconds <= 0 else seconds


def deadline_after(seconds: float | None) -> float:
    """Return the deadline ``seconds`` from now; infinite for None, zero and negative numbers."""
    return math.inf if seconds is None or seconds <= 0 else trio.current_time() + seconds
