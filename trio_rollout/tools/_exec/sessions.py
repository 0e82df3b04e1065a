"""Exec sessions: processes that outlive the calls that use them, and die with the block that owns them.

A call is one of: start and collect, write and collect, poll (an empty write), interrupt, terminate. The end of a collection
ends the call and nothing else: the process goes on. A session is stored before its output is awaited, so that a call that is
cancelled later leaves it to its owner; then ``limits.on_turn_cancel`` decides whether it dies.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from os import PathLike, fspath
from typing import final

import attrs
import trio

from ..._core.enums import Leftovers
from ..._util.condition import Condition
from ..._util.ports import Ports
from ..._util.service import open_service
from .._cleanup import CleanupBudget
from .._commands.capture import as_seconds
from .._commands.child import Spawn
from .._commands.command import Argv, Command, MakeCommand, SpawnError
from .._commands.output import HeadTailBuffer
from .._limits import DEFAULT_LIMITS, ExecLimits
from .._network import NetworkPolicy
from .._supervisor.supervisor import Supervisor
from .session import (
    ExecSession,
    Listeners,
    collect,
    exec_yield,
    poll_yield,
    run_session,
    send_interrupt,
    write_input,
)
from .values import (
    ExecOutput,
    ExecSessionEnd,
    ExecSessionsClosed,
    ExecStatistics,
    ProcessInfo,
    UnknownProcessId,
    tokens_of,
)

_log = logging.getLogger("trio_rollout.tools")

ONE_SHOT_TIMEOUT_CODE = 124
_FIRST_ID, _END_ID = 1_000, 100_000


def _unknown(process_id: int) -> UnknownProcessId:
    return UnknownProcessId(f"Unknown process id {process_id}", process_id=process_id)


def evicted(sessions: Iterable[ExecSession], limits: ExecLimits) -> ExecSession | None:
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
class SessionStore:
    """Sessions by id. ``draw(first, end)`` draws a random id.

    Invariant: an id names one process from its reservation to its release; only then can it name another.
    """

    _draw: Callable[[int, int], int]
    _reserved: set[int] = attrs.field(factory=set, init=False)
    _sessions: dict[int, ExecSession] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._sessions)

    def reserve(self) -> int:
        """Reserve a free id and return it."""
        chosen = self._draw(_FIRST_ID, _END_ID)
        while chosen in self._reserved:
            chosen = self._draw(_FIRST_ID, _END_ID)
        self._reserved.add(chosen)
        return chosen

    def insert(self, session: ExecSession) -> None:
        """Store a session under its reserved id."""
        if session.process_id not in self._reserved or session.process_id in self._sessions:
            raise AssertionError(f"process id {session.process_id} is not reserved for this session")
        self._sessions[session.process_id] = session

    def get(self, process_id: int) -> ExecSession | None:
        """Return the session that is stored under this id now."""
        return self._sessions.get(process_id)

    def holds(self, session: ExecSession) -> bool:
        """Return True while this very session is stored."""
        return self._sessions.get(session.process_id) is session

    def release(self, session: ExecSession) -> None:
        """Remove a session and free its id, unless the id already names another session."""
        if self._sessions.get(session.process_id, session) is session:
            self._sessions.pop(session.process_id, None)
            self._reserved.discard(session.process_id)

    def sessions(self) -> tuple[ExecSession, ...]:
        """Return all stored sessions."""
        return tuple(self._sessions.values())


@final
@attrs.define(eq=False, repr=False)
class ExecSessions:
    """Long-lived processes by id. Made by ``rollout.tools.open_sessions()``, or by a sandbox that supports them."""

    _spawn: Spawn
    _limits: ExecLimits
    _listeners: Listeners
    _ports: Ports
    _make: MakeCommand
    _network: NetworkPolicy | None
    _store: SessionStore = attrs.field(init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)
    _calls: int = attrs.field(default=0, init=False)
    _idle: Condition = attrs.field(factory=Condition, init=False)
    _started: int = attrs.field(default=0, init=False)
    _evicted: int = attrs.field(default=0, init=False)
    _unreaped: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._store = SessionStore(self._ports.random.randrange)

    def __repr__(self) -> str:
        counts = self.statistics()
        return f"<ExecSessions {counts.alive} alive, {counts.stored} stored{', closed' if self._closed else ''}>"

    async def exec_command(
        self,
        argv: Argv,
        *,
        call_id: str,
        cwd: str | PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        yield_time: float = 10.0,
        max_output_tokens: int | None = None,
    ) -> ExecOutput:
        """Start a process and collect its output until it ends or ``yield_time`` (0.25 to 30 s) is over.

        Blocks for the start and the collection. If the process still runs then, the result has its ``process_id`` and the
        process goes on. Cancelled before the process is stored, the process is killed; later, it is killed too, or goes on, as
        ``limits.on_turn_cancel`` says. With ``tty`` the process gets a terminal, else the null device as stdin and one pipe for
        both outputs.

        Raises:
          SpawnError: the process could not be started.
          ProcessFailed: the session was denied.
          UnknownProcessId: the session was evicted while its output was collected.
          ExecSessionsClosed: the sessions are closed.
          ToolError: the supervisor is gone.
          ValueError: argv is empty, or a number of seconds is NaN.
        """
        wait = exec_yield(self._limits, yield_time)
        with self._calling():
            session = self._new(argv, call_id, cwd, env, tty=tty)
            async with self._using(session):
                await self._start(session, self._insert)
                began = trio.current_time()
                gathered = await collect(session, began + wait)
                return await self._respond(session, gathered, began, max_output_tokens)

    async def exec_to_completion(
        self,
        argv: Argv,
        *,
        call_id: str,
        timeout: float,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
        cwd: str | PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        max_output_tokens: int | None = None,
    ) -> ExecOutput:
        """Run a process to its end: a session that never outlives its call.

        After ``timeout`` seconds the process is killed: a result with exit code 124. Cancelled, the process is dead before
        Cancelled goes on.

        Raises:
          SpawnError, ProcessFailed, ExecSessionsClosed, ToolError, ValueError: as ``exec_command``.
        """
        as_seconds(timeout)
        with self._calling():
            session = self._new(argv, call_id, cwd, env, tty=tty)
            async with self._using(session):
                await self._start(session, lambda _: None)  # not stored: the session dies with its call
                began = trio.current_time()
                gathered = await collect(session, began + timeout)
                timed_out = not session.ended
                if timed_out:
                    await session.terminate_confirmed()
                    session.pending.drain_into(gathered)
                output = await self._respond(session, gathered, began, max_output_tokens)
                await self._end(session)  # with the processes that left its group
                if timed_out:
                    output = attrs.evolve(output, timed_out=True, exit_code=ONE_SHOT_TIMEOUT_CODE, process_id=None)
                return output

    async def write_stdin(
        self, process_id: int, data: str = "", *, yield_time: float = 0.25, max_output_tokens: int | None = None
    ) -> ExecOutput:
        r"""Write to a session and collect its output; without ``data``, wait for more output (5 to 300 s).

        Calls for one session come one after the other. ``"\x03"`` alone interrupts. A session without a terminal takes
        nothing else. Cancelled, as ``exec_command``.

        Raises:
          UnknownProcessId: there is no such session, or another session has its id now.
          StdinClosed: the session takes no input.
          ProcessFailed, ExecSessionsClosed, ToolError: as ``exec_command``.
        """
        wait = (exec_yield if data else poll_yield)(self._limits, yield_time)
        with self._calling():
            session = self._known(process_id)
            async with session.lock:
                if not self._store.holds(session):  # ids are used again
                    raise _unknown(process_id)
                began = session.last_used = trio.current_time()
                async with self._using(session):
                    if data:
                        await write_input(session, data, began + wait)
                    gathered = await collect(session, began + wait)
                    return await self._respond(session, gathered, began, max_output_tokens)

    async def poll(
        self, process_id: int, *, yield_time: float = 5.0, max_output_tokens: int | None = None
    ) -> ExecOutput:
        """Wait for more output: ``write_stdin`` without data."""
        return await self.write_stdin(process_id, yield_time=yield_time, max_output_tokens=max_output_tokens)

    async def interrupt(self, process_id: int) -> None:
        """Send SIGINT to the session's group, through its terminal if it has one. The program decides what it does then.

        Raises:
          UnknownProcessId: there is no such session.
        """
        await send_interrupt(self._known(process_id))

    async def terminate_process(self, process_id: int) -> bool:
        """Kill a session and wait until it is dead.

        Returns False if there is no such session, or if its death was not confirmed in time.
        """
        session = self._store.get(process_id)
        await trio.lowlevel.checkpoint()
        if session is None or not (session.ended or await session.terminate_confirmed()):
            return False
        if self._store.holds(session) and not session.initial_active:  # else its first response releases it
            await self._end(session)
        return True

    def list_processes(self) -> tuple[ProcessInfo, ...]:
        """Return the living sessions, by id."""
        alive = [session.info() for session in self._store.sessions() if not session.ended]
        return tuple(sorted(alive, key=lambda info: info.process_id))

    def statistics(self) -> ExecStatistics:
        """Return the counts of this moment."""
        return ExecStatistics(
            started=self._started,
            stored=len(self._store),
            alive=sum(not session.ended for session in self._store.sessions()),
            evicted=self._evicted,
            unreaped=self._unreaped,
        )

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep the nursery open in which the sessions live."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def _leave(self, drain: float) -> None:
        """Refuse new calls and give the calls under way ``drain`` seconds. Then the service ends, and so the nursery."""
        self._closed = True
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(drain):
            await self._idle.wait_until(lambda: not self._calls)

    @contextmanager
    def _calling(self) -> Generator[None]:
        """Count a call for the length of a block, or refuse it."""
        if self._closed:
            raise ExecSessionsClosed("the exec sessions are closed")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.notify()

    def _new(
        self,
        argv: Argv,
        call_id: str,
        cwd: str | PathLike[str] | None,
        env: Mapping[str, str] | None,
        *,
        tty: bool,
    ) -> ExecSession:
        """Return a session that is not started yet, under a reserved id, with the network access that the policy grants it."""
        size = (self._limits.pty_rows, self._limits.pty_cols) if tty else None
        command = self._make(argv=argv, cwd=None if cwd is None else fspath(cwd), env=env, tty=size)
        grant = None if self._network is None else self._network.grant()
        granted = {} if grant is None else grant.env
        command = attrs.evolve(command, env={**command.env, **granted}, merge_stderr=True)
        now = trio.current_time()
        return ExecSession(self._store.reserve(), call_id, command, self._limits, grant, self._listeners, now)

    async def _start(self, session: ExecSession, store: Callable[[ExecSession], None]) -> None:
        """Start the session's process in the nursery; ``store`` receives the session unless it exits at once."""
        if self._nursery is None:
            raise AssertionError("the nursery of the sessions is not open")
        try:
            await self._nursery.start(partial(run_session, session, self._spawn, store, self._gone))
        except SpawnError as error:
            raise SpawnError(f"Failed to create unified exec process: {error}", errno=error.errno) from error
        self._started += 1

    def _insert(self, session: ExecSession) -> None:
        """Store a session, after an eviction if there are too many. There is no checkpoint in between."""
        victim = evicted(self._store.sessions(), self._limits)
        if victim is not None:
            self._evicted += 1
            self._release(victim)
            victim.terminate()
        self._store.insert(session)
        session.was_stored = True

    def _gone(self, session: ExecSession, confirmed: bool) -> None:  # ruff: ignore[boolean-type-hint-positional-argument]
        self._store.release(session)
        if not confirmed:
            self._unreaped += 1
            _log.warning("session %d: the end of all its processes was not confirmed in time", session.process_id)

    def _known(self, process_id: int) -> ExecSession:
        session = self._store.get(process_id)
        if session is None:
            raise _unknown(process_id)
        return session

    def _release(self, session: ExecSession) -> None:
        """Free the session's id and release the session: its task kills and reaps what is left."""
        self._store.release(session)
        session.release()

    async def _end(self, session: ExecSession) -> None:
        """Release the session and wait until it is reaped, at most ``limits.teardown`` seconds."""
        self._release(session)
        with trio.move_on_after(self._limits.teardown):
            await session.until(lambda: session.gone)

    @asynccontextmanager
    async def _using(self, session: ExecSession) -> AsyncGenerator[None]:
        """Surround the part of a call that uses the session: handle its cancellation, and release what is not stored."""
        try:
            yield
        except trio.Cancelled:
            if self._limits.on_turn_cancel is Leftovers.KILL or not self._store.holds(session):
                self._release(session)
                with trio.move_on_after(self._limits.teardown, shield=True):
                    await session.until(lambda: session.gone or session.child is None)
            raise
        finally:
            session.initial_active = False
            if not self._store.holds(session):
                self._release(session)

    async def _respond(
        self, session: ExecSession, gathered: HeadTailBuffer, began: float, tokens: int | None
    ) -> ExecOutput:
        """Return a call's output after its collection: alive, or ended and then released.

        Raises:
          ProcessFailed, ToolError: the session was denied, or lost. A denial just after an exit counts.
          UnknownProcessId: the session is not stored any more, although it has not ended.
        """
        gone = session.was_stored and not self._store.holds(session)
        if gone and (session.initial_active or not session.ended):
            raise _unknown(session.process_id)
        exit_code = await self._conclude(session) if session.ended else None
        return ExecOutput(  # nothing may cancel between the collection and its response
            call_id=session.call_id,
            chunk_id=f"{self._ports.random.getrandbits(24):06x}",
            wall_time=trio.current_time() - began,
            output=gathered.rendered(),
            omitted_bytes=gathered.omitted,
            process_id=session.process_id if exit_code is None else None,
            exit_code=exit_code,
            original_token_count=tokens_of(gathered.total),
            max_output_tokens=self._limits.output_tokens(tokens),
        )

    async def _conclude(self, session: ExecSession) -> int:
        """Free the id of an ended session, wait for a late denial, report the end; return the exit code."""
        self._store.release(session)
        await session.until(lambda: session.denial_settled)
        session.report_end()
        session.release()
        session.raise_failure()
        return session.exit_code


@asynccontextmanager
async def open_exec_sessions(
    spawn: Spawn | None = None,
    *,
    command: MakeCommand = Command,
    limits: ExecLimits | None = None,
    network: NetworkPolicy | None = None,
    on_output: Callable[[], None] = lambda: None,
    on_end: Callable[[ExecSessionEnd], None] = lambda _end: None,
    ports: Ports | None = None,
    drain_timeout: float = 5.0,
) -> AsyncGenerator[ExecSessions]:
    """Own exec sessions for the length of a block.

    Without ``spawn`` the sessions have their own supervisor; ``command`` makes a command from a call's arguments. Each session
    gets what ``network`` grants, and ends when it asks for more. ``on_output`` is called at each read, ``on_end`` at
    each session's end. Leaving blocks: calls under way in other tasks get ``drain_timeout`` (none, if the block failed or was
    cancelled), then every process is killed and reaped, shielded, within ``limits.teardown``.
    """
    limits = limits or DEFAULT_LIMITS
    async with AsyncExitStack() as stack:
        if spawn is None:
            supervisor = Supervisor(limits, limits.teardown)
            stack.push_async_callback(supervisor.end, CleanupBudget())
            spawn = supervisor.spawn
        listeners = Listeners(on_output=on_output, on_end=on_end)
        sessions = ExecSessions(spawn, limits, listeners, ports or Ports(), command, network)

        async def leave(_: None, error: BaseException | None) -> None:
            await sessions._leave(0.0 if error is not None else drain_timeout)

        async with open_service(sessions._serve, leave):
            yield sessions
