"""One exec session: a process that outlives the calls that use it.

Owns the process and what it has written since it was last asked. Its state only grows:

    running → ended (exited with a status, or failed with a message: the first one) → gone (reaped)
    output open → closed;   kept → let go

Each change wakes whoever waits; between a check and its wait there is no checkpoint.
"""

import signal
from collections.abc import Callable
from typing import final

import attrs
import trio

from ..errors import ToolError
from ._child import Child, ExitStatus
from ._command import Command
from ._denial import DenialHandle
from ._head_tail import HeadTailBuffer
from ._limits import ExecLimits
from ._session_report import SessionReport
from ._session_values import ProcessFailed, ProcessInfo


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
    _news: trio.Event = attrs.field(factory=trio.Event, init=False)

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
        self._news.set()
        self._news = trio.Event()

    async def wait_change(self) -> None:
        """Wait for the next change."""
        await self._news.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at after each change."""
        await trio.lowlevel.checkpoint()
        while not condition():
            await self._news.wait()

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
