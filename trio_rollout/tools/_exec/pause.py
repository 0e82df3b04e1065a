"""Time that stands still: while somebody holds the pause, yield deadlines don't run.

Used while a user is asked something, or while the engine is paused for a weight update. Processes are not paused, and
captured timeouts are not extended.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import attrs
import trio

from ..._util.condition import Condition


@final
@attrs.define(eq=False, repr=False)
class PauseState:
    """A clock that can be held, by any number of holders at once."""

    _holds: int = attrs.field(default=0, init=False)
    _since: float = attrs.field(default=0.0, init=False)
    _total: float = attrs.field(default=0.0, init=False)
    _resumed: Condition = attrs.field(factory=Condition, init=False)
    _limits: dict[trio.CancelScope, float] = attrs.field(factory=dict, init=False)

    @property
    def paused(self) -> bool:
        """Whether anybody holds it."""
        return self._holds > 0

    def now(self) -> float:
        """Trio's time less all the time that was paused."""
        return (self._since if self.paused else trio.current_time()) - self._total

    @contextmanager
    def hold(self) -> Generator[None]:
        """Let the time stand still for the length of a block."""
        if not self.paused:
            self._since = trio.current_time()
        self._holds += 1
        self._reschedule()
        try:
            yield
        finally:
            self._holds -= 1
            if not self.paused:
                self._total += trio.current_time() - self._since
                self._resumed.notify()
            self._reschedule()

    async def wait_running(self) -> None:
        """Wait until nobody holds it."""
        await self._resumed.wait_until(lambda: not self.paused)

    @contextmanager
    def until(self, deadline: float) -> Generator[None]:
        """End the block at ``deadline`` of this clock, later by as long as it is held meanwhile."""
        with trio.CancelScope() as scope:
            self._limits[scope] = deadline
            try:
                self._reschedule()
                yield
            finally:
                del self._limits[scope]

    def _reschedule(self) -> None:
        # Only deadlines are written here. Reading cancel_called past a deadline would latch the cancellation.
        for scope, deadline in self._limits.items():
            scope.deadline = math.inf if self.paused else deadline + self._total
