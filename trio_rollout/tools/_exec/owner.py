"""The owner of a set of exec sessions: their nursery, their store, and the rules for calls, start and end.

A session is stored before its output is awaited, so that a call that is cancelled later leaves it to its owner; then
``limits.on_turn_cancel`` decides whether it dies. Leaving: new calls are refused; calls under way may finish, within a bound;
then every process is killed and reaped.
"""

import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import final

import attrs
import trio

from ..._core.enums import Leftovers
from ..._util.condition import Condition
from ..._util.ports import Ports
from .._commands.child import Spawn
from .._commands.command import Command
from .._commands.output import HeadTailBuffer
from .._errors import SpawnError
from .._limits import ExecLimits
from .._network.policy import NetworkGrant
from .session import ExecSession, Listeners, run_session
from .store import SessionStore, evicted
from .values import ExecOutput, ExecSessionsClosed, ExecStatistics, UnknownProcessId, tokens_of

_log = logging.getLogger("trio_rollout.tools")


def unknown(process_id: int) -> UnknownProcessId:
    """Return the error for an id that names no session."""
    return UnknownProcessId(f"Unknown process id {process_id}", process_id=process_id)


def _do_not_store(_session: ExecSession) -> None:
    """Leave the session to its call, with which it dies."""


@final
@attrs.define(eq=False, repr=False)
class SessionOwner:
    """The owner of a set of exec sessions."""

    spawn: Spawn
    limits: ExecLimits
    listeners: Listeners
    ports: Ports
    store: SessionStore[ExecSession] = attrs.field(init=False)
    closed: bool = attrs.field(default=False, init=False)
    nursery: trio.Nursery | None = attrs.field(default=None, init=False)
    _calls: int = attrs.field(default=0, init=False)
    _idle: Condition = attrs.field(factory=Condition, init=False)
    _started: int = attrs.field(default=0, init=False)
    _evicted: int = attrs.field(default=0, init=False)
    _unreaped: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.store = SessionStore(self.ports.random.randrange)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep the nursery open in which the sessions live."""
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    async def leave(self, drain: float) -> None:
        """Refuse new calls and give the calls under way ``drain`` seconds. The owner of the nursery then cancels it."""
        self.closed = True
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(drain):
            await self._idle.wait_until(lambda: not self._calls)

    @contextmanager
    def calling(self) -> Generator[None]:
        """Count a call for the length of a block, or refuse it."""
        if self.closed:
            raise ExecSessionsClosed("the exec sessions are closed")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.notify()

    def new(self, command: Command, call_id: str, grant: NetworkGrant | None) -> ExecSession:
        """Return a session that is not started yet, under a reserved id."""
        now = trio.current_time()
        return ExecSession(self.store.reserve(), call_id, command, self.limits, grant, self.listeners, now)

    async def start(self, session: ExecSession, *, stored: bool) -> None:
        """Start the session's process in the nursery; with ``stored``, store the session unless it exits at once.

        Raises:
          SpawnError: the process could not be started.

        """
        if self.nursery is None:
            raise AssertionError("the nursery of the sessions is not open")
        store = self._store if stored else _do_not_store
        try:
            await self.nursery.start(partial(run_session, session, self.spawn, store, self._gone))
        except SpawnError as error:
            raise SpawnError(f"Failed to create unified exec process: {error}", errno=error.errno) from error
        self._started += 1

    def _store(self, session: ExecSession) -> None:
        """Store a session, after an eviction if there are too many. There is no checkpoint in between."""
        victim = evicted(self.store.sessions(), self.limits)
        if victim is not None:
            self._evicted += 1
            self.release(victim)
            victim.terminate()
        self.store.insert(session)
        session.was_stored = True

    def _gone(self, session: ExecSession, confirmed: bool) -> None:  # ruff: ignore[boolean-type-hint-positional-argument]
        self.store.release(session)
        if not confirmed:
            self._unreaped += 1
            _log.warning("session %d: the end of all its processes was not confirmed in time", session.process_id)

    def known(self, process_id: int) -> ExecSession:
        """Return the session stored under this id.

        Raises:
          UnknownProcessId: there is none.

        """
        session = self.store.get(process_id)
        if session is None:
            raise unknown(process_id)
        return session

    def release(self, session: ExecSession) -> None:
        """Free the session's id and release the session: its task kills and reaps what is left."""
        self.store.release(session)
        session.release()

    async def wait_gone(self, session: ExecSession) -> bool:
        """Wait until the session is reaped; return False if that exceeds ``limits.teardown``."""
        with trio.move_on_after(self.limits.teardown):
            await session.until(lambda: session.gone)
        return session.gone

    @asynccontextmanager
    async def on_call(self, session: ExecSession) -> AsyncGenerator[None]:
        """Surround the part of a call that uses the session: handle its cancellation, and release what is not stored."""
        try:
            yield
        except trio.Cancelled:
            if self.limits.on_turn_cancel is Leftovers.KILL or not self.store.holds(session):
                self.release(session)
                with trio.move_on_after(self.limits.teardown, shield=True):
                    await session.until(lambda: session.gone or session.child is None)
            raise
        finally:
            session.initial_active = False
            if not self.store.holds(session):
                self.release(session)

    async def respond(
        self, session: ExecSession, gathered: HeadTailBuffer, began: float, tokens: int | None
    ) -> ExecOutput:
        """Return a call's output after its collection: alive, or ended and then released.

        Raises:
          ProcessFailed, ToolError: the session was denied, or lost. A denial just after an exit counts.
          UnknownProcessId: the session is not stored any more, although it has not ended.

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

    async def _conclude(self, session: ExecSession) -> int:
        """Free the id of an ended session, wait for a late denial, report the end; return the exit code."""
        self.store.release(session)
        await session.until(lambda: session.denial_settled)
        session.report_end()
        session.release()
        session.raise_failure()
        return session.exit_code

    def statistics(self) -> ExecStatistics:
        """Return the counts of this moment."""
        alive = sum(not session.ended for session in self.store.sessions())
        return ExecStatistics(
            started=self._started,
            stored=len(self.store),
            alive=alive,
            evicted=self._evicted,
            unreaped=self._unreaped,
        )
