"""The gate between rollouts and servers: closed while weights change.

Owns: whether requests may be sent, the scopes of the turns under way, and the clock of their deadlines, which stands
still while the gate is closed (a paused server cannot answer in time). Opening is paced: all waiters are let through, a
bounded number per tick of the event loop, because 2,000 requests encoded in one tick stall everything else.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, final

import attrs
import trio

from .._util.condition import Condition
from ._wakeups import WakeUps

# A tick that sends 64 requests takes about 10 ms (0.15 ms of CPU each, with 512 ids): the loop stays responsive.
WAKE_PER_TICK = 64


@attrs.define(eq=False)
class Clock:
    """A time limit on a ``with`` block, which ticks while nobody holds it; in time is what has not been left by cancellation.

    The gate holds it while it is closed, and so does who waits for a server: what cannot be sent cannot be answered in time.
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
        """Start the whole limit again."""
        if self.limit == math.inf:
            return
        if self._remaining is None:
            self.scope.deadline = trio.current_time() + self.limit
        else:
            self._remaining = self.limit

    def stop(self) -> None:
        """Stand still until as many calls of ``go`` have come as of this."""
        self._holders += 1
        if self._remaining is None:
            self._remaining = self.scope.deadline - trio.current_time()
            self.scope.deadline = math.inf

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Stand still for the block, and the clock beside too."""
        held = [self] if self.beside is None else [self, self.beside]
        for clock in held:
            clock.stop()
        try:
            yield
        finally:
            for clock in held:
                clock.go()

    def go(self) -> None:
        """Go on with what was left, unless another holds it still."""
        self._holders -= 1
        if self._remaining is not None and not self._holders:
            self.scope.deadline = trio.current_time() + self._remaining
            self._remaining = None


@final
@attrs.define(eq=False)
class GateTicket(Clock):
    """One turn under way: the window it began under, and whether a window gave its call up."""

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
    """Open or closed; ``epoch`` counts the closings.

    ``version`` is the newest weight version: what is behind the gate.
    """

    wake: WakeUps = attrs.field(factory=WakeUps)
    is_open: bool = attrs.field(default=True, init=False)
    epoch: int = attrs.field(default=0, init=False)
    version: int = attrs.field(default=0, init=False)
    _left: Condition = attrs.field(factory=Condition, init=False)
    _outside: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _inside: dict[GateTicket, None] = attrs.field(factory=dict, init=False)
    _clocks: dict[Clock, None] = attrs.field(factory=dict, init=False)

    @property
    def calls(self) -> int:
        """How many turns are under way on a server."""
        return len(self._inside)

    async def until_fewer_calls(self, than: int) -> None:
        """Wait until fewer turns than ``than`` are under way on a server. Cancelled, nothing has changed."""
        await self._left.wait_until(lambda: len(self._inside) < than)

    def adopt(self, version: int) -> None:
        """Make this the newest weight version."""
        self.version = version
        self.wake.notify()

    async def wait(self) -> None:
        """Wait until requests may be sent. Cancelled, nothing has changed."""
        while not self.is_open:
            await self._outside.park()

    # Not generators: at two a rollout those were a twentieth of its cost.
    def turn(self, seconds: float | None, *, beside: Clock | None = None) -> GateTicket:
        """One turn, for a ``with`` block that it may take so many seconds of, those apart in which the gate is closed."""
        return GateTicket(self, limit_of(seconds), beside, epoch=self.epoch)

    def clock(self, seconds: float | None) -> Clock:
        """A time limit for a ``with`` block; the caller winds it up again whenever something moves."""
        return Clock(self, limit_of(seconds))

    def close(self) -> None:
        """Let no request through, and stop the clocks of what is under way."""
        self.is_open = False
        self.epoch += 1
        for clock in self._clocks:
            clock.stop()

    async def open(self) -> None:
        """Open for everybody. Blocks until all waiters were woken; cancelled, the rest is woken at once."""
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
        """Give up the calls still under way: their scopes are cancelled, their attempts are not."""
        for ticket in self._inside:
            ticket.interrupted = True
            ticket.scope.cancel(reason="weight update")


def ignore_progress() -> None:
    """In place of winding a clock, for what nobody watches: a stream that is wanted for its tokens' sake, a tool's output."""


def limit_of(seconds: float | None) -> float:
    """A time limit in seconds; None, zero and negative numbers mean none."""
    return math.inf if seconds is None or seconds <= 0 else seconds


def deadline_after(seconds: float | None) -> float:
    """The deadline so many seconds from now; None, zero and negative numbers mean none."""
    limit = limit_of(seconds)
    return limit if limit == math.inf else trio.current_time() + limit
