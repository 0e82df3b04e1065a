"""The buffer of finished groups between the pool and the trainer: bounded, in order.

Invariant 3: the buffer never exceeds its bound while the engine runs: an attempt that finished waits for room, its outcome
claimed, its slots given back.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import final

import attrs

from .._core.book import Entry
from ._wakeups import WakeUps


@final
@attrs.define(eq=False, repr=False)
class ReadyBuffer:
    """The ready groups, in the order in which they became ready.

    ``wanted`` is what a waiting consumer asked for. It raises the bound, so that a large batch can be formed at all.
    """

    max_ready: int
    wake: WakeUps
    wanted: int = attrs.field(default=0, init=False)
    _entries: dict[Entry, int | None] = attrs.field(factory=dict, init=False)
    """Each with the oldest version of its tokens."""
    _oldest: Counter[int] = attrs.field(factory=Counter, init=False)
    """The number of groups by their oldest version: each look for a group that is too old must not cost all of them."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bound(self) -> int:
        """The number of groups that may be ready."""
        return max(self.max_ready, self.wanted)

    @property
    def entries(self) -> Sequence[Entry]:
        """The ready groups."""
        return tuple(self._entries)

    @property
    def oldest(self) -> int | None:
        """The oldest version of any token in a ready group; None if there is none."""
        return min(self._oldest, default=None)

    def want(self, size: int) -> None:
        """Note that a consumer waits for ``size`` groups; 0 if none waits any more."""
        self.wanted = size
        self.wake.admission.notify()

    def add(self, entries: Iterable[Entry]) -> None:
        """Append groups that have just become ready."""
        for entry in entries:
            self._enter(entry)
        self.wake.consumers.notify()

    def put_in_front(self, entries: Sequence[Entry]) -> None:
        """Put groups back that had been taken, in their order."""
        others, self._entries = self._entries, {}
        for entry in entries:
            self._enter(entry)
        self._entries.update(others)
        self.wake.consumers.notify()

    def remove(self, entries: Iterable[Entry]) -> None:
        """Take these groups out, and so make room."""
        for entry in entries:
            oldest = self._entries.pop(entry)
            if oldest is not None:
                self._oldest[oldest] -= 1
                if not self._oldest[oldest]:
                    del self._oldest[oldest]
        self.wake.admission.notify()

    def _enter(self, entry: Entry) -> None:
        oldest = None if entry.group is None else entry.group.oldest_version
        self._entries[entry] = oldest
        if oldest is not None:
            self._oldest[oldest] += 1
