"""One exec session: a process that outlives the calls that use it, and the tasks that watch it.

``ExecSession`` owns the process and the output that no call has fetched yet. Its state only grows:

    running → ended (exited with a status, or failed with the first message) → gone (reaped)
    output open → closed;   kept → released

Each change notifies the waiting tasks; between a check and its wait there is no checkpoint.

``run_session`` is started with ``nursery.start``, which gives "store before wait" for nothing: a call that is cancelled before
the start was reported takes the process with it; after the report the process lives in the nursery of the sessions.
"""

import logging
import math
import signal
from collections.abc import Callable
from functools import partial
from typing import final

import attrs
import trio

from ..._core.failures import leaves_of
from ..._util.condition import Condition
from ..._util.user_code import logging_failures
from ...errors import ToolError
from .._commands.capture import as_seconds
from .._commands.child import Child, ExitStatus, Spawn
from .._commands.command import Command
from .._commands.output import HeadTailBuffer
from .._limits import ExecLimits
from .._network import NetworkGrant
from .values import ExecSessionEnd, ProcessFailed, ProcessInfo, StdinClosed

_log = logging.getLogger("trio_rollout.tools")

INTERRUPT = "\x03"


@attrs.frozen(kw_only=True)
class Listeners:
    """The callbacks of a set of exec sessions. They must not block."""

    on_output: Callable[[], None] = lambda: None
    """Called at each read."""
    on_end: Callable[[ExecSessionEnd], None] = lambda _end: None
    """Called at each session's end. An error is logged and changes nothing."""


@final
@attrs.define(eq=False, repr=False)
class ExecSession:
    """A process under an id, and everything known about it."""

    process_id: int
    call_id: str
    command: Command
    limits: ExecLimits
    grant: NetworkGrant | None
    listeners: Listeners
    started_at: float
    last_used: float = attrs.field(init=False)
    child: Child | None = attrs.field(default=None, init=False)
    status: ExitStatus | None = attrs.field(default=None, init=False)
    failure: str | None = attrs.field(default=None, init=False)
    """The message of its denial."""
    error: ToolError | None = attrs.field(default=None, init=False)
    """The loss of its supervisor, or a bug."""
    output_closed: bool = attrs.field(default=False, init=False)
    denial_settled: bool = attrs.field(default=False, init=False)
    """True once no denial can come any more."""
    initial_active: bool = attrs.field(default=True, init=False)
    """True until the first call's response was made."""
    was_stored: bool = attrs.field(default=False, init=False)
    released: bool = attrs.field(default=False, init=False)
    gone: bool = attrs.field(default=False, init=False)
    lock: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    """Held by the one call that uses the session."""
    pending: HeadTailBuffer = attrs.field(init=False)
    _transcript: HeadTailBuffer = attrs.field(init=False)
    _end_reported: bool = attrs.field(default=False, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)

    def __attrs_post_init__(self) -> None:
        self.last_used = self.started_at
        self.pending = HeadTailBuffer(self.limits.session_bytes)
        self._transcript = HeadTailBuffer(self.limits.session_bytes)

    @property
    def ended(self) -> bool:
        """True once the process has exited, or has failed (then it may still be dying)."""
        return self.status is not None or self.failure is not None or self.error is not None

    @property
    def busy(self) -> bool:
        """True while a call writes to the session or polls it."""
        return self.lock.locked()

    @property
    def exit_code(self) -> int:
        """The exit code, 128 + N for a signal; -1 if it is unknown."""
        return -1 if self.status is None else self.status.exit_code

    def raise_failure(self) -> None:
        """Raise the session's failure, if it has one: ProcessFailed after a denial, else a ToolError."""
        if self.error is not None:
            raise self.error
        if self.failure is not None:
            raise ProcessFailed(f"Unified exec process failed: {self.failure}")

    def info(self) -> ProcessInfo:
        """Return the session's entry in a listing."""
        return ProcessInfo(
            process_id=self.process_id,
            call_id=self.call_id,
            command=self.command.argv,
            cwd=self.command.cwd,
            tty=self.command.tty is not None,
            started_at=self.started_at,
            last_used=self.last_used,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; each change of the session evaluates it."""
        await self._changed.wait_until(condition)

    def changed(self) -> None:
        """Wake the tasks that wait for what has changed."""
        self._changed.notify()

    def terminate(self) -> None:
        """Send SIGKILL to the group. The exit is observed like any other."""
        if self.child is not None and not self.gone:
            self.child.signal_group(signal.SIGKILL)

    async def terminate_confirmed(self) -> bool:
        """Send SIGKILL to the group and wait for the exit; return False if the exit does not come in time."""
        self.terminate()
        with trio.move_on_after(self.limits.confirm_timeout):
            await self.until(lambda: self.status is not None or self.gone)
        return self.status is not None or self.gone

    def fail_and_terminate(self, message: str) -> None:
        """Record a denial: the session has ended from now on, whatever its process does. The first message stays."""
        if self.failure is None:
            self.failure = message
        self.terminate()
        self.changed()

    def fail(self, error: ToolError) -> None:
        """Record that the supervisor is gone, or a bug; the first error stays."""
        if self.error is None:
            self.error = error
        self.changed()

    def finish_grant(self) -> None:
        """Let the network policy forget the session."""
        if self.grant is not None:
            self.grant.finish()

    def release(self) -> None:
        """Let the session go: its task kills and reaps what is left."""
        self.released = True
        self.changed()

    def set_gone(self) -> None:
        """Record that the process is reaped: take over its exit status, and report the end if that is missing."""
        if self.status is None and self.child is not None:
            self.status = self.child.exited() or ExitStatus(None)
        self.gone = self.output_closed = self.denial_settled = True
        self.finish_grant()
        self.report_end()
        self.changed()

    def add_output(self, chunk: bytes | bytearray) -> None:
        """Take over a chunk of output."""
        self.pending.append(chunk)
        self._transcript.append(chunk)
        self.listeners.on_output()
        self.changed()

    def report_end(self) -> None:
        """Tell the listener that the session has ended. Only the first call does, and only for a process that ran."""
        if self._end_reported or self.child is None:
            return
        self._end_reported = True
        failure = self.failure or (str(self.error) if self.error is not None else None)
        transcript = self._transcript.rendered()
        if failure is not None:
            transcript = b"\n".join(part for part in (transcript, failure.encode()) if part)
        end = ExecSessionEnd(
            call_id=self.call_id,
            process_id=self.process_id,
            command=self.command.argv,
            cwd=self.command.cwd,
            exit_code=self.exit_code if failure is None else -1,
            aggregated=transcript,
            failure=failure,
            duration=trio.current_time() - self.started_at,
        )
        with logging_failures(_log, "a listener of exec sessions failed"):
            self.listeners.on_end(end)


async def run_session(
    session: ExecSession,
    spawn: Spawn,
    store: Callable[[ExecSession], None],
    on_gone: Callable[[ExecSession, bool], None],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Start the process, watch it until the session is released, then kill and reap it.

    Reports its start once the process has outlived ``limits.early_exit``, and stores the session then, or once the process has
    exited before. ``on_gone`` receives True at the end if the death of every process is confirmed.

    Raises:
      SpawnError, ToolError: the process could not be started; raised before the start is reported.
    """
    child = await _spawned(session, spawn)
    try:
        async with trio.open_nursery() as nursery:
            await _watch_early_exit(session, child, nursery)
            task_status.started()
            if not session.ended:
                store(session)
                nursery.start_soon(_watch_end, session)
            await session.until(lambda: session.released)
            nursery.cancel_scope.cancel("the session was released")
    except* Exception as group:  # ruff: ignore[blind-except]  a bug in one session must not end the others
        _log.exception("a task of session %d failed", session.process_id)
        session.fail(ToolError(f"session {session.process_id}: {leaves_of(group)[0]!r}"))
    finally:
        confirmed = False
        with trio.move_on_after(session.limits.teardown, shield=True):
            confirmed = await child.release()
        child.close()
        session.set_gone()
        on_gone(session, confirmed)


async def _spawned(session: ExecSession, spawn: Spawn) -> Child:
    try:
        session.child = child = await spawn(session.command)
    except BaseException:
        session.finish_grant()
        raise
    session.started_at = trio.current_time()
    return child


async def _watch_early_exit(session: ExecSession, child: Child, nursery: trio.Nursery) -> None:
    """Start to watch the process, and give it the time for an early exit."""
    nursery.start_soon(_read_output, session, child)
    nursery.start_soon(_watch_exit, session, child)
    nursery.start_soon(_watch_denial, session)
    with trio.move_on_after(session.limits.early_exit):
        await session.until(lambda: session.ended)
    await trio.lowlevel.checkpoint()  # the last moment at which a cancelled call takes the process with it


async def _read_output(session: ExecSession, child: Child) -> None:
    """Read all output, also while no call collects it: else the process would block on a full pipe."""
    try:
        while chunk := await child.stdout.receive_some(session.limits.delta_bytes):
            session.add_output(chunk)
    finally:
        session.output_closed = True
        session.changed()


async def _watch_exit(session: ExecSession, child: Child) -> None:
    await trio.lowlevel.checkpoint()
    try:
        session.status = await child.wait_exited()
        session.changed()
    except ToolError as error:
        session.fail(error)


async def _watch_denial(session: ExecSession) -> None:
    """End the session at its first denial; a denial just after its exit still counts."""
    await trio.lowlevel.checkpoint()
    grant = session.grant
    if grant is not None:

        async def end_grace(scope: trio.CancelScope) -> None:
            await session.until(lambda: session.ended)
            scope.deadline = trio.current_time() + session.limits.late_denial

        async with trio.open_nursery() as race:
            race.start_soon(end_grace, race.cancel_scope)
            await grant.wait_denied()
            race.cancel_scope.cancel()
        message = grant.finish()
        if message is not None:
            session.fail_and_terminate(message)
    session.denial_settled = True
    session.changed()


async def _watch_end(session: ExecSession) -> None:
    """Report the end of a stored session: after its output, a late denial, and the call that uses the session."""
    await session.until(lambda: session.ended)
    with trio.move_on_after(session.limits.trailing_output):
        await session.until(lambda: session.output_closed)
    await session.until(lambda: session.denial_settled)
    async with session.lock:
        session.report_end()


def exec_yield(limits: ExecLimits, asked: float) -> float:
    """Return the seconds that a start or a write waits for output. Raises ValueError for NaN."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield), limits.max_yield)


def poll_yield(limits: ExecLimits, asked: float) -> float:
    """Return the seconds that a poll waits for output. Raises ValueError for NaN."""
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
