"""The buffer of finished groups between the pool and the trainer: bounded, in order.

Invariant 3: the buffer never exceeds its bound while the engine runs: an attempt that finished waits for room, its outcome
claimed, its slots given back.
"""

from collections import deque
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
    _entries: deque[Entry] = attrs.field(factory=deque, init=False)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bound(self) -> int:
        """The number of groups that may be ready."""
        return max(self.max_ready, self.wanted)

    @property
    def entries(self) -> Sequence[Entry]:
        """The ready groups."""
        return self._entries

    def want(self, size: int) -> None:
        """Note that a consumer waits for ``size`` groups; 0 if none waits any more."""
        self.wanted = size
        self.wake.admission.notify()

    def add(self, entries: Iterable[Entry]) -> None:
        """Append groups that have just become ready."""
        self._entries.extend(entries)
        self.wake.consumers.notify()

    def put_in_front(self, entries: Sequence[Entry]) -> None:
        """Put groups back that had been taken, in their order."""
        self._entries.extendleft(reversed(entries))
        self.wake.consumers.notify()

    def remove(self, entries: Iterable[Entry]) -> None:
        """Take these groups out, and so make room."""
        gone = set(entries)
        self._entries = deque(entry for entry in self._entries if entry not in gone)
        self.wake.admission.notify()
