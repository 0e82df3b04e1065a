"""Exec sessions: processes that outlive the calls that use them, and die with the block that owns them.

A call is one of: start and collect, write and collect, poll (an empty write), interrupt, terminate. The end of a collection
ends the call and nothing else: the process goes on. ``limits.on_turn_cancel`` says what a cancelled call does to its process.
"""

import math
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from os import PathLike, fspath
from typing import final

import attrs
import trio

from ..._util.ports import Ports
from ..._util.service import open_service
from .._cleanup import CleanupBudget
from .._commands.child import Spawn
from .._commands.command import Argv, MakeCommand, plain_command
from .._commands.expiration import as_seconds
from .._commands.output import HeadTailBuffer
from .._limits import DEFAULT_LIMITS, ExecLimits
from .._network.policy import NetworkGrant, NetworkPolicy
from .._supervisor.supervisor import open_supervisor
from .owner import SessionOwner, unknown
from .session import ExecSession, Listeners
from .values import ExecOutput, ExecSessionEnd, ExecStatistics, ProcessInfo, StdinClosed

ONE_SHOT_TIMEOUT_CODE = 124
INTERRUPT = "\x03"


def exec_yield(limits: ExecLimits, asked: float) -> float:
    """Return the seconds that a start or a write waits for output. ValueError for NaN, as below."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield), limits.max_yield)


def poll_yield(limits: ExecLimits, asked: float) -> float:
    """Return the seconds that a poll waits for output."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield, limits.min_poll), max(limits.max_background, limits.min_poll))


async def collect(session: ExecSession, deadline: float) -> HeadTailBuffer:
    """Collect the session's output until ``deadline`` on Trio's clock, or until it has ended and its output is closed.

    Once the process has exited, output that stays open (a grandchild has it) is awaited for ``post_exit_close``. Each byte
    goes to exactly one collection. Never raises for time; cancelled, the gathered output goes to the next collection.
    """
    gathered = HeadTailBuffer(session.limits.session_bytes)
    try:
        await _gather(session, gathered, deadline)
    except trio.Cancelled:
        session.pending.drain_into(gathered)
        session.pending = gathered
        raise
    return gathered


async def _gather(session: ExecSession, gathered: HeadTailBuffer, deadline: float) -> None:
    closing = math.inf
    while True:
        await trio.lowlevel.checkpoint()
        drained = session.pending.drain_into(gathered)
        now = trio.current_time()
        if session.ended:
            closing = min(closing, now + session.limits.post_exit_close)
        if (session.ended and session.output_closed) or now >= min(deadline, closing):
            return
        if not drained:
            with trio.CancelScope(deadline=min(deadline, closing)):
                await session.until(partial(_has_news, session, closing))


def _has_news(session: ExecSession, closing: float) -> bool:
    """Return True if output has come, the session has ended since ``closing`` was set, or its output is closed."""
    return bool(session.pending.total) or (session.ended and (session.output_closed or closing == math.inf))


async def send_interrupt(session: ExecSession) -> None:
    """Send SIGINT to the group, or Ctrl-C to the terminal, which signals its foreground job.

    Raises:
      StdinClosed: the terminal accepts nothing.

    """
    await trio.lowlevel.checkpoint()
    child = session.child
    if child is None or session.ended:
        return
    if child.stdin is None:
        child.signal_group(signal.SIGINT)
        return
    try:
        await child.stdin.send_all(INTERRUPT.encode())  # the line discipline makes a signal of it
    except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError) as error:
        raise StdinClosed("failed to write to stdin") from error


async def write_input(session: ExecSession, data: str, deadline: float) -> None:
    """Write to the session's terminal, and give the program a moment to react. Gives up at ``deadline``.

    Raises:
      StdinClosed: the session has no terminal, and this is no interrupt; or the terminal did not take the data and the process
        has not ended.

    """
    if session.command.tty is None:
        if data != INTERRUPT:
            raise StdinClosed("stdin is closed for this session; rerun exec_command with tty=true to keep stdin open")
        await send_interrupt(session)
        return
    sent = False
    if session.child is not None and session.child.stdin is not None:
        try:
            with trio.CancelScope(deadline=deadline):
                await session.child.stdin.send_all(data.encode())
                sent = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the process is ending, or has ended: the check below decides
    with trio.move_on_after(session.limits.post_write):
        await session.until(lambda: session.ended)
    if not sent and not session.ended:
        raise StdinClosed("failed to write to stdin")


@final
@attrs.define(eq=False, repr=False)
class ExecSessions:
    """Long-lived processes by id. Made by ``rollout.tools.open_sessions()``, or by a sandbox that supports them."""

    _owner: SessionOwner
    _make: MakeCommand
    _network: NetworkPolicy | None

    def __repr__(self) -> str:
        counts = self.statistics()
        return f"<ExecSessions {counts.alive} alive, {counts.stored} stored{', closed' if self._owner.closed else ''}>"

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
        wait = exec_yield(self._owner.limits, yield_time)
        with self._owner.calling():
            session = self._new(argv, call_id, cwd, env, tty=tty)
            async with self._owner.on_call(session):
                await self._owner.start(session, stored=True)
                began = trio.current_time()
                gathered = await collect(session, began + wait)
                return await self._owner.respond(session, gathered, began, max_output_tokens)

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
        with self._owner.calling():
            session = self._new(argv, call_id, cwd, env, tty=tty)
            async with self._owner.on_call(session):
                await self._owner.start(session, stored=False)
                began = trio.current_time()
                gathered = await collect(session, began + timeout)
                timed_out = not session.ended
                if timed_out:
                    await session.terminate_confirmed()
                    session.pending.drain_into(gathered)
                output = await self._owner.respond(session, gathered, began, max_output_tokens)
                self._owner.release(session)
                await self._owner.wait_gone(session)  # with the processes that left its group
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
        wait = (exec_yield if data else poll_yield)(self._owner.limits, yield_time)
        with self._owner.calling():
            session = self._owner.known(process_id)
            async with session.lock:
                if not self._owner.store.holds(session):  # ids are used again
                    raise unknown(process_id)
                session.last_used = trio.current_time()
                async with self._owner.on_call(session):
                    return await self._interact(session, data, wait, max_output_tokens)

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
        await send_interrupt(self._owner.known(process_id))

    async def terminate_process(self, process_id: int) -> bool:
        """Kill a session and wait until it is dead.

        Returns False if there is no such session, or if its death was not confirmed in time.
        """
        session = self._owner.store.get(process_id)
        await trio.lowlevel.checkpoint()
        if session is None or not (session.ended or await session.terminate_confirmed()):
            return False
        if self._owner.store.holds(session) and not session.initial_active:  # else its first response releases it
            self._owner.release(session)
            await self._owner.wait_gone(session)
        return True

    def list_processes(self) -> tuple[ProcessInfo, ...]:
        """Return the living sessions, by id."""
        alive = [session.info() for session in self._owner.store.sessions() if not session.ended]
        return tuple(sorted(alive, key=lambda info: info.process_id))

    def statistics(self) -> ExecStatistics:
        """Return the counts of this moment."""
        return self._owner.statistics()

    def _new(
        self,
        argv: Argv,
        call_id: str,
        cwd: str | PathLike[str] | None,
        env: Mapping[str, str] | None,
        *,
        tty: bool,
    ) -> ExecSession:
        """Make a session, with the network access that the policy grants it."""
        size = (self._owner.limits.pty_rows, self._owner.limits.pty_cols) if tty else None
        command = self._make(argv, cwd=None if cwd is None else fspath(cwd), env=env, tty=size)
        grant: NetworkGrant | None = None
        if self._network is not None:
            grant = self._network.grant()
            command = attrs.evolve(command, env={**command.env, **grant.env})
        return self._owner.new(attrs.evolve(command, merge_stderr=True), call_id, grant)

    async def _interact(self, session: ExecSession, data: str, wait: float, tokens: int | None) -> ExecOutput:
        began = trio.current_time()
        if data:
            await write_input(session, data, began + wait)
        gathered = await collect(session, began + wait)
        return await self._owner.respond(session, gathered, began, tokens)


@asynccontextmanager
async def open_exec_sessions(
    spawn: Spawn | None = None,
    *,
    command: MakeCommand = plain_command,
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
            spawn = (await stack.enter_async_context(open_supervisor(limits, limits.teardown, CleanupBudget()))).spawn
        owner = SessionOwner(spawn, limits, Listeners(on_output=on_output, on_end=on_end), ports or Ports())

        async def leave(_: None, error: BaseException | None) -> None:
            await owner.leave(0.0 if error is not None else drain_timeout)

        async with open_service(owner.serve, leave):
            yield ExecSessions(owner, command, network)
