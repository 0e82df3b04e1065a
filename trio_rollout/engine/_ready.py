"""The buffer of finished groups between the pool and the trainer: bounded, in order.

Invariant 3: it never exceeds its bound while the engine runs: an attempt that finished waits for room, its outcome claimed,
its slots given back.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import final

import attrs

from .._core.book import Book, Entry
from .._core.values import Group
from .._util.condition import Condition


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class ReadyBuffer:
    """Ready groups. ``came`` is notified when one came; ``changed`` when some left, or a consumer wants more.

    ``wanted`` is what a waiting consumer asked for: it raises the bound, so that a large batch can be formed at all; ``due``
    counts the unfinished groups that it waits for because pacing wants them in its batch.
    """

    book: Book
    max_ready: int
    came: Condition
    changed: Condition
    due: Callable[[], int]
    wanted: int = attrs.field(default=0, init=False)
    _bounded: bool = attrs.field(default=True, init=False)
    _entries: deque[Entry] = attrs.field(factory=deque, init=False)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bound(self) -> int:
        """How many groups may be ready."""
        return max(self.max_ready, self.wanted)

    @property
    def entries(self) -> Sequence[Entry]:
        """The ready groups, as they came."""
        return self._entries

    def _has_room(self) -> bool:
        """A consumer that waits for a group must not be what that group waits for: it lifts the bound."""
        return not self._bounded or len(self) < self.bound or bool(self.wanted and self.due())

    async def put(self, entry: Entry, group: Group) -> None:
        """Make a finished group ready, once there is room. Cancelled while it waits, it becomes ready all the same."""
        try:
            if not self._has_room():
                await self.changed.wait_until(self._has_room)
        finally:
            self.book.finish(entry, group)
            self._entries.append(entry)
            self.came.notify()

    def want(self, size: int) -> None:
        """A consumer waits for so many groups; 0: nobody does."""
        self.wanted = size
        self.changed.notify()

    def lift_bound(self) -> None:
        """From now on a finished group never waits for room: the engine is being drained."""
        self._bounded = False
        self.changed.notify()

    def add(self, entries: Iterable[Entry]) -> None:
        """Append groups that are ready already: a ledger remembers them."""
        self._entries.extend(entries)

    def put_in_front(self, entries: Sequence[Entry]) -> None:
        """Put back groups that were taken, in their order."""
        self._entries.extendleft(reversed(entries))
        self.came.notify()

    def remove(self, entries: Iterable[Entry]) -> None:
        """Take these groups out. The caller notifies ``changed`` when it has made up its mind."""
        for entry in entries:
            self._entries.remove(entry)
