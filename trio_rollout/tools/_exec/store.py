"""Exec sessions by id, and the choice of the session that is evicted for a new one. No I/O.

Invariant: an id names one process from its reservation to its release; only then can it name another.
"""

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar, final

import attrs

from .._limits import ExecLimits

_FIRST_ID, _END_ID = 1_000, 100_000


class StoredSession(Protocol):
    """The part of a session that the store needs."""

    process_id: int
    last_used: float

    @property
    def ended(self) -> bool:
        """True once the session's process has exited or failed."""
        ...

    @property
    def busy(self) -> bool:
        """True while a call uses the session."""
        ...


T = TypeVar("T", bound=StoredSession)


def evicted(sessions: Iterable[T], limits: ExecLimits) -> T | None:
    """Return the session that is evicted for a new one; None if there is room, or no session may be evicted.

    The most recently used sessions are protected. An ended session goes before living ones, and the least recently used before
    others. Sessions in use are passed over. While an ended one is in use (it will go soon), no living session is evicted: the
    store may then exceed its limit.
    """
    by_use = sorted(sessions, key=lambda session: session.last_used)
    if len(by_use) < limits.max_processes:
        return None
    candidates = by_use[: max(0, len(by_use) - limits.protected)]
    ended = [session for session in candidates if session.ended]
    return next((session for session in ended or candidates if not session.busy), None)


@final
@attrs.define(eq=False, repr=False)
class SessionStore(Generic[T]):
    """Sessions by id. ``draw(first, end)`` draws a random id."""

    _draw: Callable[[int, int], int]
    _reserved: set[int] = attrs.field(factory=set, init=False)
    _sessions: dict[int, T] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._sessions)

    def reserve(self) -> int:
        """Reserve a free id and return it."""
        chosen = self._draw(_FIRST_ID, _END_ID)
        while chosen in self._reserved:
            chosen = self._draw(_FIRST_ID, _END_ID)
        self._reserved.add(chosen)
        return chosen

    def insert(self, session: T) -> None:
        """Store a session under its reserved id."""
        if session.process_id not in self._reserved or session.process_id in self._sessions:
            raise AssertionError(f"process id {session.process_id} is not reserved for this session")
        self._sessions[session.process_id] = session

    def get(self, process_id: int) -> T | None:
        """Return the session that is stored under this id now."""
        return self._sessions.get(process_id)

    def holds(self, session: T) -> bool:
        """Return True while this very session is stored."""
        return self._sessions.get(session.process_id) is session

    def release(self, session: T) -> None:
        """Remove a session and free its id, unless the id already names another session."""
        if self._sessions.get(session.process_id, session) is session:
            self._sessions.pop(session.process_id, None)
            self._reserved.discard(session.process_id)

    def sessions(self) -> tuple[T, ...]:
        """Return all stored sessions."""
        return tuple(self._sessions.values())
