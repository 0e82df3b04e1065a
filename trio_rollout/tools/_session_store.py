"""Which sessions are stored under which id, and which one has to go for a new one. No I/O.

Invariant: an id names one process from its reservation to its release; only then can it name another.
"""

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar, final

import attrs

from ._limits import ExecLimits

_FIRST_ID, _END_ID = 1_000, 100_000


class Entry(Protocol):
    """What has to be known about a session to store it."""

    process_id: int
    last_used: float

    @property
    def ended(self) -> bool:
        """Whether its process has exited or failed."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a call is using it."""
        ...


T = TypeVar("T", bound=Entry)


def victim(entries: Iterable[T], limits: ExecLimits) -> T | None:
    """The entry that has to go before another is stored; None: none has to, or none can.

    The most recently used are safe. An ended one goes first, the least recently used before others. Entries in use are
    passed over, and while an ended one is in use (it is about to go) no living one is sacrificed: the store may then hold
    more than it should.
    """
    by_use = sorted(entries, key=lambda entry: entry.last_used)
    if len(by_use) < limits.max_processes:
        return None
    candidates = by_use[: max(0, len(by_use) - limits.protected)]
    ended = [entry for entry in candidates if entry.ended]
    return next((entry for entry in ended or candidates if not entry.busy), None)


@final
@attrs.define(eq=False, repr=False)
class SessionStore(Generic[T]):
    """Sessions by id. ``deterministic`` ids count up from 1000."""

    _draw: Callable[[int, int], int]
    _deterministic: bool = attrs.field(default=False, kw_only=True, alias="deterministic")
    _reserved: set[int] = attrs.field(factory=set, init=False)
    _entries: dict[int, T] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._entries)

    def reserve(self) -> int:
        """Take a free id."""
        if self._deterministic:
            chosen = max(self._reserved, default=_FIRST_ID - 1) + 1
        else:
            chosen = self._draw(_FIRST_ID, _END_ID)
            while chosen in self._reserved:
                chosen = self._draw(_FIRST_ID, _END_ID)
        self._reserved.add(chosen)
        return chosen

    def insert(self, entry: T) -> None:
        """Store a session under the id that was reserved for it."""
        if entry.process_id not in self._reserved or entry.process_id in self._entries:
            raise AssertionError(f"process id {entry.process_id} is not reserved for this session")
        self._entries[entry.process_id] = entry

    def get(self, process_id: int) -> T | None:
        """The session that is stored under this id now."""
        return self._entries.get(process_id)

    def holds(self, entry: T) -> bool:
        """Whether this very session is still stored."""
        return self._entries.get(entry.process_id) is entry

    def release(self, entry: T) -> None:
        """Forget a session and free its id, unless that already names another one."""
        if self._entries.get(entry.process_id, entry) is entry:
            self._entries.pop(entry.process_id, None)
            self._reserved.discard(entry.process_id)

    def give_back(self, process_id: int) -> None:
        """Free an id that was reserved and not used."""
        if process_id not in self._entries:
            self._reserved.discard(process_id)

    def entries(self) -> tuple[T, ...]:
        """All stored sessions."""
        return tuple(self._entries.values())
