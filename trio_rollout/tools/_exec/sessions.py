"""Collecting a session's output for one call, until its yield deadline: which ends the call, never the process.

Input of a session: text for its terminal, and the interrupt, which every session takes.

Exec sessions: processes that outlive the calls that use them, and die with the block that owns them.

Owns the nursery in which the sessions live and the store of their ids. A call is one of: start and collect, write and
collect, poll (an empty write), interrupt, terminate. That a collection is over ends the call and nothing else; what a
cancelled call means for its process is ``limits.on_turn_cancel``.
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
from .._commands.captured import HeadTailBuffer
from .._commands.child import Spawn
from .._commands.cleanup import WrapUp
from .._commands.command import Argv, Command, MakeCommand, plain_command
from .._commands.expiration import as_seconds
from .._limits import DEFAULT_LIMITS, ExecLimits
from .._network.policy import DenialHandle, NetworkPolicy
from .._supervisor.supervisor import open_supervisor
from .host import SessionHost, SessionStore, unknown
from .pause import PauseState
from .session import Session
from .values import ExecOutput, ExecStatistics, ProcessInfo, SessionListener, StdinClosed, WriteToStdinError


def exec_yield(limits: ExecLimits, asked: float) -> float:
    """How long a start waits for output. ValueError for NaN, as below."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield), limits.max_yield)


def poll_yield(limits: ExecLimits, asked: float) -> float:
    """How long a poll that writes nothing waits."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield, limits.min_poll), max(limits.max_background, limits.min_poll))


def write_yield(limits: ExecLimits, asked: float) -> float:
    """How long a write waits for output."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield), limits.max_yield)


async def collect(session: Session, deadline: float, pause: PauseState) -> HeadTailBuffer:
    """Everything the session writes until ``deadline``, or until it has ended and its output is closed.

    ``deadline`` is on the clock of ``pause``: while that is held, nothing ends the collection, not even an exit. Once the
    process has exited, output that stays open (a grandchild has it) is awaited for ``post_exit_close``. Each byte
    goes to exactly one collection. Never raises for time; cancelled, what it had gathered waits for the next one.
    """
    gathered = HeadTailBuffer(session.limits.session_bytes)
    try:
        await _gather(session, gathered, deadline, pause)
    except trio.Cancelled:
        session.pending.drain_into(gathered)
        session.pending = gathered
        raise
    return gathered


def _has_news(session: Session, closing: float) -> bool:
    """Output has come, or the session has ended since ``closing`` was set, or its output is closed."""
    return bool(session.pending.total) or (session.ended and (session.output_closed or closing == math.inf))


async def _gather(session: Session, gathered: HeadTailBuffer, deadline: float, pause: PauseState) -> None:
    closing = math.inf
    while True:
        await pause.wait_running()
        drained = session.pending.drain_into(gathered)
        now = pause.now()
        if session.ended:
            closing = min(closing, now + session.limits.post_exit_close)
        if (session.ended and session.output_closed) or now >= min(deadline, closing):
            return
        if not drained:
            with pause.until(min(deadline, closing)):
                await session.until(partial(_has_news, session, closing))


INTERRUPT = "\x03"


async def send_interrupt(session: Session) -> None:
    """What Ctrl-C means: SIGINT for the group, or for whatever is in the terminal's foreground."""
    await trio.lowlevel.checkpoint()
    child = session.child
    if child is None or session.ended:
        return
    if child.stdin is None:
        child.signal_group(signal.SIGINT)
        return
    try:
        await child.stdin.send_all(INTERRUPT.encode())  # the line discipline makes it a signal
    except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError) as error:
        raise WriteToStdinError("failed to write to stdin") from error


async def write_input(session: Session, data: str, deadline: float, pause: PauseState) -> None:
    """Write, and give the program a moment to react. A terminal that takes nothing is given up at ``deadline``.

    Raises:
      StdinClosed: the session has no terminal, and this is no interrupt.
      WriteToStdinError: the terminal did not take it, and the process has not ended.

    """
    if session.command.tty is None:
        if data != INTERRUPT:
            raise StdinClosed("stdin is closed for this session; rerun exec_command with tty=true to keep stdin open")
        await send_interrupt(session)
        return
    sent = False
    if session.child is not None and session.child.stdin is not None:
        try:
            with pause.until(deadline):
                await session.child.stdin.send_all(data.encode())
                sent = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it is ending, or has: looked at below
    with trio.move_on_after(session.limits.post_write):
        await session.until(lambda: session.ended)
    if not sent and not session.ended:
        raise WriteToStdinError("failed to write to stdin")


ONE_SHOT_TIMEOUT_CODE = 124


@final
@attrs.define(eq=False, repr=False)
class ExecSessions:
    """Long-lived processes by id. Made by ``open_exec_sessions``."""

    _host: SessionHost
    _make: MakeCommand
    _network: NetworkPolicy | None

    def __repr__(self) -> str:
        counts = self.statistics()
        return f"<ExecSessions {counts.alive} alive, {counts.stored} stored{', closed' if self._host.closed else ''}>"

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
        denial: DenialHandle | None = None,
        process_id: int | None = None,
    ) -> ExecOutput:
        """Start a process and collect its output until it ends or ``yield_time`` (0.25 to 30 s) is over.

        Blocks for its start and the collection. If it still runs then, the result has its ``process_id`` and it goes
        on; ``process_id`` may be one that was reserved before. Cancelled before the process is stored, it is killed;
        afterwards it is killed too, or goes on, as ``limits.on_turn_cancel`` says. With ``tty`` it gets a terminal, else
        the null device as stdin and one pipe for both outputs.

        Raises:
          CreateProcessError: it could not be started.
          ProcessFailed: it was denied.
          UnknownProcessId: it was evicted while its output was collected.
          ExecSessionsClosed: the sessions are closed.
          ToolError: what contains it is gone.
          ValueError: argv is empty, or a number of seconds is NaN.

        """
        wait = exec_yield(self._host.limits, yield_time)
        with self._host.calling():
            command, denial = self._under_policy(self._command(argv, cwd, env, tty=tty), denial)
            session = self._host.new(command, call_id, denial, process_id)
            async with self._host.on_call(session):
                await self._host.start(session, stored=True)
                began = trio.current_time()
                gathered = await collect(session, self._host.pause.now() + wait, self._host.pause)
                return await self._host.respond(session, gathered, began, max_output_tokens)

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
        denial: DenialHandle | None = None,
    ) -> ExecOutput:
        """One-shot mode: the same life, but the process never outlives the call.

        After ``timeout`` seconds it is killed: a result with exit code 124. Cancelled, it is dead before Cancelled goes on.

        Raises:
          CreateProcessError, ProcessFailed, ExecSessionsClosed, ToolError, ValueError: as ``exec_command``.

        """
        as_seconds(timeout)
        with self._host.calling():
            command, denial = self._under_policy(self._command(argv, cwd, env, tty=tty), denial)
            session = self._host.new(command, call_id, denial, None)
            async with self._host.on_call(session):
                await self._host.start(session, stored=False)
                began = trio.current_time()
                gathered = await collect(session, began + timeout, PauseState())
                timed_out = not session.ended
                if timed_out:
                    await session.terminate_confirmed()
                    session.pending.drain_into(gathered)
                output = await self._host.respond(session, gathered, began, max_output_tokens)
                self._host.forget(session)
                await self._host.wait_gone(session)  # with what has left its group
                if timed_out:
                    output = attrs.evolve(output, timed_out=True, exit_code=ONE_SHOT_TIMEOUT_CODE, process_id=None)
                return output

    async def write_stdin(
        self, process_id: int, data: str = "", *, yield_time: float = 0.25, max_output_tokens: int | None = None
    ) -> ExecOutput:
        r"""Write to a session and collect what it says; without ``data``, wait for more (5 to 300 s).

        Calls for one session come one after the other. ``"\x03"`` alone interrupts. A session without a terminal takes
        nothing else. Cancelled, as ``exec_command``.

        Raises:
          UnknownProcessId: there is no such session, or it has been replaced meanwhile.
          StdinClosed, WriteToStdinError: it takes no input.
          ProcessFailed, ExecSessionsClosed, ToolError: as ``exec_command``.

        """
        bound = (write_yield if data else poll_yield)(self._host.limits, yield_time)
        with self._host.calling():
            session = self._host.known(process_id)
            async with session.lock:
                if not self._host.store.holds(session):  # ids are used again
                    raise unknown(process_id)
                session.last_used = trio.current_time()
                async with self._host.on_call(session):
                    output = await self._interact(session, data, bound, max_output_tokens)
            if data or output.alive:
                session.report.interaction(data)
            return output

    async def poll(
        self, process_id: int, *, yield_time: float = 5.0, max_output_tokens: int | None = None
    ) -> ExecOutput:
        """Wait for more output: ``write_stdin`` without data."""
        return await self.write_stdin(process_id, yield_time=yield_time, max_output_tokens=max_output_tokens)

    async def interrupt(self, process_id: int) -> None:
        """SIGINT to the session's group (through its terminal, if it has one). The program decides what that means.

        Raises:
          UnknownProcessId: there is no such session.

        """
        await send_interrupt(self._host.known(process_id))

    async def terminate_process(self, process_id: int) -> bool:
        """Kill a session and wait until it is dead; False if there is none, or if its death was not confirmed in time."""
        session = self._host.store.get(process_id)
        await trio.lowlevel.checkpoint()
        if session is None or not (session.ended or await session.terminate_confirmed()):
            return False
        if self._host.store.holds(session) and not session.initial_active:  # else its first response takes it away
            self._host.forget(session)
            await self._host.wait_gone(session)
        return True

    async def terminate_all(self) -> None:
        """Kill every stored session and wait, bounded, until they are dead."""
        await trio.lowlevel.checkpoint()
        sessions = self._host.store.entries()
        for session in sessions:
            session.terminate()
            self._host.forget(session)
        for session in sessions:
            await self._host.wait_gone(session)

    def reserve_id_nowait(self) -> int:
        """Reserve an id for an ``exec_command`` to come."""
        return self._host.store.reserve()

    def release_id_nowait(self, process_id: int) -> None:
        """Give back an id that was reserved and not used."""
        self._host.store.give_back(process_id)

    def list_processes(self) -> tuple[ProcessInfo, ...]:
        """The living sessions, by id."""
        alive = [session.info() for session in self._host.store.entries() if not session.ended]
        return tuple(sorted(alive, key=lambda info: info.process_id))

    def statistics(self) -> ExecStatistics:
        """Counts of this moment."""
        return self._host.statistics()

    def _command(
        self, argv: Argv, cwd: str | PathLike[str] | None, env: Mapping[str, str] | None, *, tty: bool
    ) -> Command:
        size = (self._host.limits.pty_rows, self._host.limits.pty_cols) if tty else None
        command = self._make(argv, cwd=None if cwd is None else fspath(cwd), env=env, tty=size)
        return attrs.evolve(command, merge_stderr=True)

    def _under_policy(self, command: Command, denial: DenialHandle | None) -> tuple[Command, DenialHandle | None]:
        """The command with what the network policy grants it, unless the call brought a denial handle of its own."""
        if denial is not None or self._network is None:
            return command, denial
        grant = self._network.grant()
        return attrs.evolve(command, env={**command.env, **grant.env}), grant.denial

    async def _interact(self, session: Session, data: str, bound: float, tokens: int | None) -> ExecOutput:
        host = self._host
        began = trio.current_time()
        deadline = host.pause.now() + bound
        if data:
            await write_input(session, data, deadline, host.pause)
        gathered = await collect(session, deadline, host.pause)
        return await host.respond(session, gathered, began, tokens)


@asynccontextmanager
async def open_exec_sessions(
    spawn: Spawn | None = None,
    *,
    command: MakeCommand = plain_command,
    limits: ExecLimits | None = None,
    network: NetworkPolicy | None = None,
    pause: PauseState | None = None,
    listeners: tuple[SessionListener, ...] = (),
    on_output: Callable[[], None] = lambda: None,
    ports: Ports | None = None,
    deterministic_ids: bool = False,
    drain_timeout: float = 5.0,
) -> AsyncGenerator[ExecSessions]:
    """Own exec sessions for the length of a block. Use ``rollout.tools.open_sessions()`` inside a rollout.

    Without ``spawn`` the sessions have a supervisor of their own; ``command`` makes what it is given from the arguments
    of a call. Each session is granted what ``network`` allows, and ends when it asks for more. ``on_output`` is told of each
    read, also of what listeners are not told any more. Leaving blocks: calls under way in other tasks get ``drain_timeout`` (none, if the block failed or was cancelled), then every process is killed and reaped, shielded,
    within ``limits.teardown``.
    """
    limits = limits or DEFAULT_LIMITS
    ports = ports or Ports()
    async with AsyncExitStack() as stack:
        if spawn is None:
            spawn = (await stack.enter_async_context(open_supervisor(limits, limits.teardown, WrapUp()))).spawn
        store: SessionStore[Session] = SessionStore(ports.random.randrange, deterministic=deterministic_ids)
        host = SessionHost(spawn, limits, pause or PauseState(), listeners, on_output, ports, store)

        async def leave(_: None, error: BaseException | None) -> None:
            await host.leave(0.0 if error is not None else drain_timeout)

        async with open_service(host.serve, leave):
            yield ExecSessions(host, command, network)
