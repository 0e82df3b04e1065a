"""Which sessions are stored under which id, and which one has to go for a new one. No I/O.

Invariant: an id names one process from its reservation to its release; only then can it name another.

Where sessions live: the nursery they run in, the store of their ids, and the rules of starting and leaving them.

A session is stored before its output is awaited, so that a call that is cancelled later leaves it to its owner; whether it
then dies is ``limits.on_turn_cancel``. Leaving: no new calls; those under way may finish, within a bound; then
every process is killed and reaped.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar, final

import attrs
import trio

from ..._util.condition import Condition
from ..._util.ports import Ports
from .._commands.captured import HeadTailBuffer
from .._commands.child import Spawn
from .._commands.command import Command
from .._errors import SpawnError
from .._limits import ExecLimits, OnTurnCancel
from .._network.policy import DenialHandle
from .pause import PauseState
from .report import SessionReport
from .session import Session, live
from .values import (
    CreateProcessError,
    ExecOutput,
    ExecSessionsClosed,
    ExecStatistics,
    SessionListener,
    UnknownProcessId,
    tokens_of,
)

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


_log = logging.getLogger("trio_rollout.tools")


def unknown(process_id: int) -> UnknownProcessId:
    """The error for an id that names nothing."""
    return UnknownProcessId(f"Unknown process id {process_id}", process_id=process_id)


def _keep_out(_session: Session) -> None:
    """Not stored: it dies with its call."""


@final
@attrs.define(eq=False, repr=False)
class SessionHost:
    """The owner of a set of sessions."""

    spawn: Spawn
    limits: ExecLimits
    pause: PauseState
    listeners: tuple[SessionListener, ...]
    on_output: Callable[[], None]
    ports: Ports
    store: SessionStore[Session]
    closed: bool = attrs.field(default=False, init=False)
    nursery: trio.Nursery | None = attrs.field(default=None, init=False)
    _calls: int = attrs.field(default=0, init=False)
    _idle: Condition = attrs.field(factory=Condition, init=False)
    _started: int = attrs.field(default=0, init=False)
    _evicted: int = attrs.field(default=0, init=False)
    _unreaped: int = attrs.field(default=0, init=False)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep the nursery open in which the sessions live."""
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    async def leave(self, drain: float) -> None:
        """Refuse new calls and give those under way ``drain`` seconds. Whoever owns the nursery ends it then."""
        self.closed = True
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(drain):
            await self._idle.wait_until(lambda: not self._calls)

    @contextmanager
    def calling(self) -> Generator[None]:
        """Count a call, or refuse it."""
        if self.closed:
            raise ExecSessionsClosed("the exec sessions are closed")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.notify()

    def new(self, command: Command, call_id: str, denial: DenialHandle | None, process_id: int | None) -> Session:
        """A session that is not started yet, under an id of its own."""
        now = trio.current_time()
        chosen = self.store.reserve() if process_id is None else process_id
        report = SessionReport(chosen, call_id, command, self.limits, self.listeners, self.on_output)
        return Session(chosen, call_id, command, self.limits, report, denial, now, now)

    async def start(self, session: Session, *, stored: bool) -> None:
        """Start the session's process in the nursery; with ``stored``, it is stored if it does not exit at once.

        Raises:
          CreateProcessError: it could not be started.

        """
        if self.nursery is None:
            raise AssertionError("the nursery of the sessions is not open")
        keep = self._keep if stored else _keep_out
        try:
            await self.nursery.start(partial(live, session, self.spawn, keep, self._gone))
        except SpawnError as error:
            raise CreateProcessError(f"Failed to create unified exec process: {error}", errno=error.errno) from error
        self._started += 1

    def _keep(self, session: Session) -> None:
        """Store a session, at the expense of another if there are too many. No checkpoint comes between."""
        evicted = victim(self.store.entries(), self.limits)
        if evicted is not None:
            self._evicted += 1
            self.forget(evicted)
            evicted.terminate()
        self.store.insert(session)
        session.was_stored = True

    def _gone(self, session: Session, proven: bool) -> None:  # ruff: ignore[boolean-type-hint-positional-argument]
        self.store.release(session)
        if not proven:
            self._unreaped += 1
            _log.warning("session %d: that nothing of it is left was not proven when it was let go", session.process_id)

    def known(self, process_id: int) -> Session:
        """The session stored under this id.

        Raises:
          UnknownProcessId: there is none.

        """
        session = self.store.get(process_id)
        if session is None:
            raise unknown(process_id)
        return session

    def forget(self, session: Session) -> None:
        """Free the session's id and let it go: what is left of it is killed and reaped by its own task."""
        self.store.release(session)
        session.release()

    async def wait_gone(self, session: Session) -> bool:
        """Wait until the session is reaped; False if that takes longer than it may."""
        with trio.move_on_after(self.limits.teardown):
            await session.until(lambda: session.gone)
        return session.gone

    @asynccontextmanager
    async def on_call(self, session: Session) -> AsyncGenerator[None]:
        """The part of a call that uses the session: what its cancellation means, and that nothing unstored stays."""
        try:
            yield
        except trio.Cancelled:
            if self.limits.on_turn_cancel is OnTurnCancel.DIE or not self.store.holds(session):
                self.forget(session)
                with trio.move_on_after(self.limits.teardown, shield=True):
                    await session.until(lambda: session.gone or session.child is None)
            raise
        finally:
            session.initial_active = False
            if not self.store.holds(session):
                self.forget(session)

    async def respond(self, session: Session, gathered: HeadTailBuffer, began: float, tokens: int | None) -> ExecOutput:
        """What a call returns after its collection: alive, or ended and then forgotten.

        Raises:
          ProcessFailed, ToolError: it was denied, or lost. A denial that comes just after an exit counts.
          UnknownProcessId: it is not stored any more, although it has not ended.

        """
        exit_code: int | None = None
        gone = session.was_stored and not self.store.holds(session)
        if gone and (session.initial_active or not session.ended):
            raise unknown(session.process_id)
        if session.ended:
            exit_code = await self._conclude(session)
        alive = exit_code is None
        return ExecOutput(  # noqa: ASYNC910  nothing may cancel between the collection and its response
            call_id=session.call_id,
            chunk_id=f"{self.ports.random.getrandbits(24):06x}",
            wall_time=trio.current_time() - began,
            output=gathered.rendered(),
            omitted_bytes=gathered.omitted,
            process_id=session.process_id if alive else None,
            exit_code=exit_code,
            original_token_count=tokens_of(gathered.total),
            max_output_tokens=self.limits.output_tokens(tokens),
        )

    async def _conclude(self, session: Session) -> int:
        """Free the id of an ended session, give a late denial its time, tell the end."""
        self.store.release(session)
        await session.until(lambda: session.denial_settled)
        session.tell_end()
        session.release()
        session.raise_failure()
        return session.exit_code

    def statistics(self) -> ExecStatistics:
        """Counts of this moment."""
        alive = sum(not session.ended for session in self.store.entries())
        return ExecStatistics(
            started=self._started,
            stored=len(self.store),
            alive=alive,
            evicted=self._evicted,
            unreaped=self._unreaped,
        )
