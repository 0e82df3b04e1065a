"""Waiting for a condition over shared state: level-triggered, so that no wake-up can be lost."""

from collections.abc import Callable
from typing import final

import attrs
import trio


@final
@attrs.define(eq=False, repr=False)
class StateChange:
    """Wakes those who wait for a condition; whoever changes the state calls ``notify``."""

    _waiting: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    def notify(self) -> None:
        """Let every waiter look at its condition again."""
        self._waiting.unpark_all()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is true.

        Always a checkpoint, and none lies between the condition's last evaluation and the return: what it saw still
        holds. Cancelled, nothing has changed.
        """
        await trio.lowlevel.checkpoint()
        while not condition():
            await self._waiting.park()
