"""Slots: the permission to run a rollout. Claimed for a whole group at once, given back one by one.

Invariant 2: the slots in use are as many as the rollouts of running attempts that are not over.
"""

from types import TracebackType
from typing import Self, final

import attrs

from .._util.condition import Condition


@final
@attrs.define(eq=False, repr=False)
class Slots:
    """``total`` slots. ``changed`` is notified when some become free. ``holders`` is the number of groups that have any."""

    total: int
    changed: Condition
    in_use: int = attrs.field(default=0, init=False)
    holders: int = attrs.field(default=0, init=False)

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

    def _give_back(self, count: int, *, last: bool) -> None:
        self.in_use -= count
        self.holders -= last
        self.changed.notify()


@final
@attrs.define(eq=False, repr=False)
class SlotLease:
    """The slots of one group; a context manager that gives back what is left of them."""

    _slots: Slots
    _held: int

    def release_one(self) -> None:
        """Give one slot back: a rollout is over."""
        if self._held:
            self._held -= 1
            self._slots._give_back(1, last=not self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        held, self._held = self._held, 0
        if held:
            self._slots._give_back(held, last=True)
