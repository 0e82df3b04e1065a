"""Slots: permission to run a rollout. Claimed for a whole attempt at once, given back one by one.

A sample that rests before its next try holds no slot. It waits for one before its try begins, first come, first served,
and before any new group: a slot that becomes free is handed to a waiting sample.

Invariant 2: slots in use equal the tries that are under way.
"""

from types import TracebackType
from typing import Self, final

import attrs
import trio

from .._util.condition import Condition


@final
@attrs.define(eq=False, repr=False)
class Slots:
    """``total`` slots. ``changed`` is notified when some become free.

    ``holders`` is the number of groups that still sample; ``resting`` that of the groups among them that hold no slot, because
    all their unfinished samples rest.
    """

    total: int
    changed: Condition
    in_use: int = attrs.field(default=0, init=False)
    holders: int = attrs.field(default=0, init=False)
    resting: int = attrs.field(default=0, init=False)
    _waiting: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    @property
    def free(self) -> int:
        """The number of slots that may be claimed now."""
        return self.total - self.in_use

    def claim(self, count: int) -> "SlotLease":
        """Take ``count`` slots; the lease must be entered, or they are never given back."""
        if count > self.free:
            raise AssertionError(f"{count} slots claimed, {self.free} are free")
        self.in_use += count
        self.holders += 1
        return SlotLease(self, count)

    async def _take(self) -> None:
        """Wait for one slot. Cancelled, none was taken."""
        if self.free > 0:
            self.in_use += 1
        else:
            await self._waiting.park()  # the slot changes hands: it stays in use

    def _give_back(self, count: int) -> None:
        handed = min(count, len(self._waiting))
        if handed:
            self._waiting.unpark(count=handed)
        self.in_use -= count - handed
        self.changed.notify()


@final
@attrs.define(eq=False, repr=False)
class SlotLease:
    """The slots of one attempt; a context manager that gives back what is left of them, when nothing more is sampled."""

    _slots: Slots
    _unused: int
    _used: int = attrs.field(default=0, init=False)
    _rests: bool = attrs.field(default=False, init=False)

    async def take(self) -> None:
        """Take one slot for a try: one that was claimed with the group, else the next that is free. Cancelled, none was taken."""
        if self._unused:
            self._unused -= 1
        else:
            await self._slots._take()
        if self._rests:
            self._rests = False
            self._slots.resting -= 1
        self._used += 1

    def release_one(self) -> None:
        """Give back the slot of a try that is over."""
        self._used -= 1
        if not self._used and not self._unused:
            self._rests = True
            self._slots.resting += 1
        self._slots._give_back(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        held, self._unused, self._used = self._unused + self._used, 0, 0
        self._slots.holders -= 1
        self._slots.resting -= self._rests
        self._slots._give_back(held)
