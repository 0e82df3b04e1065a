"""A started process as the rest of the room sees it: one port with three backends.

``_direct`` starts it as a child of this process, ``_supervisor`` inside a process of its own that contains everything
below it, and tests have one that runs by script. The rules that all of them keep:

1. ``pid`` is the id of a process group and of a session, and stays so until ``release``: the exit of the leader is
   observed without reaping it. So ``signal_group`` can never hit a stranger.
2. After ``release`` nothing is signalled any more.

Commands as children of this very process: for those who run one outside a rollout.

A process group is all that contains them: a descendant that calls ``setsid`` leaves it and lives on.
"""

import os
import signal
import subprocess  # ruff: ignore[suspicious-subprocess-import]  its constants only
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias, final

import attrs
import trio

from .._errors import SpawnError
from .command import Command


@attrs.frozen
class ExitStatus:
    """How a process ended: its code, or the signal that killed it."""

    code: int | None
    signal: int | None = None

    @classmethod
    def of(cls, info: os.waitid_result) -> "ExitStatus":
        """From what ``waitid`` says."""
        return cls(info.si_status) if info.si_code == os.CLD_EXITED else cls(None, info.si_status)

    @property
    def exit_code(self) -> int:
        """As a shell says it: 128 + N after death by signal N."""
        if self.signal is not None:
            return 128 + self.signal
        return -1 if self.code is None else self.code


class Child(Protocol):
    """One started process and what runs in its group."""

    @property
    def pid(self) -> int:
        """Id of the leader, of its process group and of its session."""
        ...

    @property
    def stdout(self) -> trio.abc.ReceiveStream:
        """What it writes; with a terminal or a merged stderr, both streams in order."""
        ...

    @property
    def stderr(self) -> trio.abc.ReceiveStream | None:
        """What it complains; None where stdout has both."""
        ...

    @property
    def stdin(self) -> trio.abc.SendStream | None:
        """Its terminal; None where its stdin is the null device."""
        ...

    def exited(self) -> ExitStatus | None:
        """How the leader ended; None while it runs. Does not reap it.

        Raises:
          ToolError: whoever could tell is gone.

        """
        ...

    async def wait_exited(self) -> ExitStatus:
        """Wait for the leader's exit, without reaping it. One task at a time.

        Raises:
          ToolError: whoever could tell is gone.

        """
        ...

    def signal_group(self, number: signal.Signals) -> bool:
        """Signal the leader's group; False if there is nothing left to signal."""
        ...

    async def release(self, *, spare: bool = False) -> bool:
        """Kill what is left and reap it; True when nothing is known to be left. What was written can still be read.

        ``spare`` leaves what still runs to the scope around, with its output read and thrown away. Idempotent. The
        caller shields and bounds it; cancelled, the kill has been sent and only the proof is missing.
        """
        ...

    def close(self) -> None:
        """Close the streams. Idempotent; comes last."""
        ...


Spawn: TypeAlias = Callable[[Command], Awaitable[Child]]
"""Starts a command. Cancelled, nothing is left running.

Raises SpawnError if it can't be started."""


@final
@attrs.define(eq=False, repr=False)
class DirectChild:
    """A child process of the host, observed through a pidfd of our own so that nothing reaps it early.

    Even ``repr(process)`` of Trio's process reaps: nothing but ``release`` may touch it.
    """

    _process: trio.Process
    _pidfd: int | None
    pid: int
    stdout: trio.abc.ReceiveStream
    stderr: trio.abc.ReceiveStream | None
    stdin: trio.abc.SendStream | None = None
    _status: ExitStatus | None = None

    def exited(self) -> ExitStatus | None:
        """How the leader ended, if it has."""
        if self._status is None:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            self._status = ExitStatus.of(info) if info is not None else None
        return self._status

    async def wait_exited(self) -> ExitStatus:
        """Wait for the leader's exit."""
        await trio.lowlevel.checkpoint()
        while (status := self.exited()) is None:
            if self._pidfd is None:
                raise AssertionError(f"process {self.pid} was released before its exit was seen")
            await trio.lowlevel.wait_readable(self._pidfd)
        return status

    def signal_group(self, number: signal.Signals) -> bool:
        """Signal the group, unless the leader was reaped."""
        if self._pidfd is None:
            return False
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    async def release(self, *, spare: bool = False) -> bool:
        """Kill the group and reap the leader."""
        if spare:
            raise AssertionError("a command without a rollout has nobody to leave processes to")
        if self._pidfd is not None:
            self.signal_group(signal.SIGKILL)
            await self.wait_exited()
            os.close(self._pidfd)
            self._pidfd = None  # from here on nothing is signalled
        await self._process.wait()  # at once: it is a zombie, or was reaped before
        return True

    def close(self) -> None:
        """Close the streams."""
        for stream in (self._process.stdout, self._process.stderr):
            if isinstance(stream, trio.lowlevel.FdStream):
                stream.close()


async def spawn_direct(command: Command) -> DirectChild:
    """Start ``command`` in a session and process group of its own, its stdin the null device.

    Blocks for the start (a worker thread forks). Cancelled, the process is killed and reaped.

    Raises:
      SpawnError: it could not be started.

    """
    if command.tty or command.rlimits:
        raise AssertionError("terminals and resource limits need the supervisor")
    try:
        process = await trio.lowlevel.open_process(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if command.merge_stderr else subprocess.PIPE,
            cwd=command.cwd,
            env=command.env,
            start_new_session=True,
            umask=command.umask,
        )
    except OSError as error:
        raise SpawnError(f"{command.argv[0]}: could not be started: {error}", errno=error.errno) from error
    return await _observed(process)


async def _observed(process: trio.Process) -> DirectChild:
    """Wrap a fresh process."""
    if process.stdout is None:
        raise AssertionError("stdout was asked for as a pipe")
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        os.killpg(process.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True):  # bounded by the kill above
            await process.wait()
        raise SpawnError(f"process {process.pid} can't be watched: {error}", errno=error.errno) from error
    return DirectChild(process, pidfd, process.pid, process.stdout, process.stderr)  # noqa: ASYNC910  its owner first
