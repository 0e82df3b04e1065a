"""One exec session: a process that outlives the calls that use it.

Owns the process and what it has written since it was last asked. Its state only grows:

    running → ended (exited with a status, or failed with a message: the first one) → gone (reaped)
    output open → closed;   kept → let go

Each change wakes whoever waits; between a check and its wait there is no checkpoint.

The tasks of one session, from its start to its burial: a nursery of its own inside that of the sessions.

``live`` is started with ``nursery.start``, which gives "store before wait" for nothing: cancelled before it has reported,
the process dies with its call; afterwards it lives in the nursery of the sessions.
"""

import logging
import signal
from collections.abc import Callable
from typing import final

import attrs
import trio

from ..._core.failures import leaves_of
from ..._util.condition import Condition
from ...errors import ToolError
from .._commands.captured import HeadTailBuffer
from .._commands.child import Child, ExitStatus, Spawn
from .._commands.command import Command
from .._limits import ExecLimits
from .._network.policy import DenialHandle
from .report import SessionReport
from .values import ProcessFailed, ProcessInfo


@final
@attrs.define(eq=False, repr=False)
class Session:
    """A process under an id, and everything known about it."""

    process_id: int
    call_id: str
    command: Command
    limits: ExecLimits
    report: SessionReport
    denial: DenialHandle | None
    started_at: float
    last_used: float
    child: Child | None = attrs.field(default=None, init=False)
    status: ExitStatus | None = attrs.field(default=None, init=False)
    failure: str | None = attrs.field(default=None, init=False)
    error: ToolError | None = attrs.field(default=None, init=False)
    output_closed: bool = attrs.field(default=False, init=False)
    denial_settled: bool = attrs.field(default=False, init=False)
    initial_active: bool = attrs.field(default=True, init=False)
    was_stored: bool = attrs.field(default=False, init=False)
    let_go: bool = attrs.field(default=False, init=False)
    gone: bool = attrs.field(default=False, init=False)
    lock: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    pending: HeadTailBuffer = attrs.field(init=False)
    _news: Condition = attrs.field(factory=Condition, init=False)

    def __attrs_post_init__(self) -> None:
        self.pending = HeadTailBuffer(self.limits.session_bytes)

    @property
    def ended(self) -> bool:
        """Whether the process has exited, or has failed (it may still be dying then)."""
        return self.status is not None or self.failed

    @property
    def failed(self) -> bool:
        """Whether it was denied, or lost by what contains it."""
        return self.failure is not None or self.error is not None

    @property
    def busy(self) -> bool:
        """Whether a call is writing to it or polling it."""
        return self.lock.locked()

    @property
    def exit_code(self) -> int:
        """Its exit code, 128 + N for a signal; -1 if nobody knows."""
        return -1 if self.status is None else self.status.exit_code

    def raise_failure(self) -> None:
        """Raise what it failed of, if it did.

        Raises:
          ProcessFailed: it was denied.
          ToolError: what contains it is gone.

        """
        if self.error is not None:
            raise self.error
        if self.failure is not None:
            raise ProcessFailed(f"Unified exec process failed: {self.failure}")

    def info(self) -> ProcessInfo:
        """As it is listed."""
        return ProcessInfo(
            process_id=self.process_id,
            call_id=self.call_id,
            command=self.command.argv,
            cwd=self.command.cwd,
            tty=self.command.tty is not None,
            started_at=self.started_at,
            last_used=self.last_used,
        )

    def changed(self) -> None:
        """Wake everybody who waits for a change."""
        self._news.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at after each change."""
        await self._news.wait_until(condition)

    def terminate(self) -> None:
        """SIGKILL to the group. Its exit is observed as any other."""
        if self.child is not None and not self.gone:
            self.child.signal_group(signal.SIGKILL)

    async def terminate_confirmed(self) -> bool:
        """SIGKILL to the group, and wait for the exit; False if it does not come in time."""
        self.terminate()
        with trio.move_on_after(self.limits.confirm_timeout):
            await self.until(lambda: self.status is not None or self.gone)
        return self.status is not None or self.gone

    def fail_and_terminate(self, message: str) -> None:
        """It was denied: ended from now on, whatever its process does. The first message stays."""
        if self.failure is None:
            self.failure = message
        self.terminate()
        self.changed()

    def lose(self, error: ToolError) -> None:
        """What contains the process is gone."""
        if self.error is None:
            self.error = error
        self.changed()

    def finish_denial(self) -> None:
        """Let the policy that may deny the session forget it."""
        if self.denial is not None:
            self.denial.finish()

    def release(self) -> None:
        """Nobody needs it any more: what is left of it is killed and reaped."""
        self.let_go = True
        self.changed()

    def bury(self) -> None:
        """It is reaped: take over its last words, and tell its end if nobody has."""
        if self.status is None and self.child is not None:
            self.status = self.child.exited() or ExitStatus(None)
        self.gone = self.output_closed = self.denial_settled = True
        self.finish_denial()
        self.tell_end()
        self.changed()

    def take(self, chunk: bytes | bytearray) -> None:
        """More output."""
        self.pending.append(chunk)
        self.report.output(chunk)
        self.changed()

    def close_output(self) -> None:
        """No more output."""
        self.report.output_end()
        self.output_closed = True
        self.changed()

    def tell_end(self) -> None:
        """Tell that it is over, unless that was told before."""
        message = self.failure or (str(self.error) if self.error is not None else None)
        self.report.end(self.exit_code, message)


_log = logging.getLogger("trio_rollout.tools")


async def live(
    session: Session,
    spawn: Spawn,
    store: Callable[[Session], None],
    on_gone: Callable[[Session, bool], None],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Start the process, watch it until the session is let go, then kill and reap it; ``on_gone`` hears if that is proven.

    Reports once it runs and has either outlived ``limits.early_exit``, and is stored then, or has not.

    Raises:
      SpawnError, ToolError: before it has reported: it could not be started.

    """
    child = await _spawned(session, spawn)
    try:
        session.report.begin()
        async with trio.open_nursery() as nursery:
            await _settle_in(session, child, nursery)
            task_status.started()
            if not session.ended:
                store(session)
                nursery.start_soon(_watch_end, session)
            await session.until(lambda: session.let_go)
            nursery.cancel_scope.cancel("the session was let go")
    except* Exception as group:  # ruff: ignore[blind-except]  a bug in one session must not end the others
        _log.exception("a task of session %d failed", session.process_id)
        session.lose(ToolError(f"session {session.process_id}: {leaves_of(group)[0]!r}"))
    finally:
        proven = False
        with trio.move_on_after(session.limits.teardown, shield=True):
            proven = await child.release()
        child.close()
        session.bury()
        on_gone(session, proven)


async def _spawned(session: Session, spawn: Spawn) -> Child:
    try:
        session.child = child = await spawn(session.command)
    except BaseException:
        session.finish_denial()
        raise
    return child


async def _settle_in(session: Session, child: Child, nursery: trio.Nursery) -> None:
    """Start to watch the process, and give it the time to exit at once."""
    nursery.start_soon(_read_output, session, child)
    nursery.start_soon(_watch_exit, session, child)
    nursery.start_soon(_watch_denial, session)
    with trio.move_on_after(session.limits.early_exit):
        await session.until(lambda: session.ended)
    await trio.lowlevel.checkpoint()  # the last moment at which a cancelled call takes the process with it


async def _read_output(session: Session, child: Child) -> None:
    """Always runs: a process that nobody reads would wait for us."""
    try:
        while chunk := await child.stdout.receive_some(session.limits.delta_bytes):
            session.take(chunk)
    finally:
        session.close_output()


async def _watch_exit(session: Session, child: Child) -> None:
    await trio.lowlevel.checkpoint()
    try:
        session.status = await child.wait_exited()
    except ToolError as error:
        session.lose(error)
    session.changed()


async def _watch_denial(session: Session) -> None:
    """The first denial ends the session; one that comes just after its exit still counts."""
    await trio.lowlevel.checkpoint()
    denial = session.denial
    if denial is not None:

        async def grace(scope: trio.CancelScope) -> None:
            await session.until(lambda: session.ended)
            scope.deadline = trio.current_time() + session.limits.late_denial

        async with trio.open_nursery() as race:
            race.start_soon(grace, race.cancel_scope)
            await denial.wait()
            race.cancel_scope.cancel()
        message = denial.finish()
        if message is not None:
            session.fail_and_terminate(message)
    session.denial_settled = True
    session.changed()


async def _watch_end(session: Session) -> None:
    """Tell the end of a stored session: its output first, then a late denial, then whoever is using it."""
    await session.until(lambda: session.ended)
    with trio.move_on_after(session.limits.trailing_output):
        await session.until(lambda: session.output_closed)
    await session.until(lambda: session.denial_settled)
    async with session.lock:
        session.tell_end()
