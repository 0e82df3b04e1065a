"""A started process as the rest of the tools see it: the port ``Child``, and its simplest implementation.

There are three implementations: ``DirectChild`` below is a child of this process, ``SupervisedChild`` runs inside a
supervisor that contains everything below it, and tests have a scripted one. All keep two rules:

1. ``pid`` is the id of a process group and of a session until ``release``: the exit of the leader is observed without
   reaping it. So ``signal_group`` can never reach a stranger's process.
2. After ``release`` nothing is signalled.
"""

import os
import signal
import subprocess  # ruff: ignore[suspicious-subprocess-import]  its constants only
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias, final

import attrs
import trio

from .command import Command, SpawnError


@attrs.frozen
class ExitStatus:
    """The end of a process: an exit code, or the signal that killed the process."""

    code: int | None
    signal: int | None = None

    @classmethod
    def of(cls, info: os.waitid_result) -> "ExitStatus":
        """Return the status in an answer of ``waitid``."""
        return cls(info.si_status) if info.si_code == os.CLD_EXITED else cls(None, info.si_status)

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 + N after death by signal N."""
        if self.signal is not None:
            return 128 + self.signal
        return -1 if self.code is None else self.code


class Child(Protocol):
    """One started process and the processes in its group."""

    @property
    def pid(self) -> int:
        """Id of the leader, of its process group and of its session."""
        ...

    @property
    def stdout(self) -> trio.abc.ReceiveStream:
        """Standard output; with a terminal or a merged stderr, both outputs in order."""
        ...

    @property
    def stderr(self) -> trio.abc.ReceiveStream | None:
        """Standard error; None where ``stdout`` has both outputs."""
        ...

    @property
    def stdin(self) -> trio.abc.SendStream | None:
        """The process's terminal; None where stdin is the null device."""
        ...

    def exited(self) -> ExitStatus | None:
        """Return the leader's exit status, None while the leader runs. Does not reap it. ToolError: as ``wait_exited``."""
        ...

    async def wait_exited(self) -> ExitStatus:
        """Wait for the leader's exit, without reaping it. One task at a time.

        Raises:
          ToolError: the supervisor that could tell is gone.
        """
        ...

    def signal_group(self, number: signal.Signals) -> bool:
        """Signal the leader's group; return False if there is nothing left to signal."""
        ...

    async def release(self, *, keep_running: bool = False) -> bool:
        """Kill the remaining processes and reap them; return True if nothing is known to be left.

        Output that was written can still be read. With ``keep_running`` the remaining processes go on until the surrounding
        scope ends, and their output is read and discarded. Idempotent. The caller shields and bounds the call; cancelled,
        the kill has been sent and only its confirmation is missing.
        """
        ...

    def close(self) -> None:
        """Close the streams. Idempotent; comes last."""
        ...


Spawn: TypeAlias = Callable[[Command], Awaitable[Child]]
"""Starts a command. Cancelled, no process is left. Raises SpawnError if the command can't be started."""


def group_signalled(pid: int, number: signal.Signals) -> bool:
    """Signal a process group; return False if it has no process."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True


@final
@attrs.define(eq=False, repr=False)
class DirectChild:
    """A child of the host process (see ``Child``), observed through a pidfd so that nothing reaps it early.

    A process group is all that contains it: a descendant that calls ``setsid`` leaves the group and lives on. Only ``release``
    may touch Trio's process object: even its ``repr`` reaps.
    """

    _process: trio.Process
    _pidfd: int | None
    pid: int
    stdout: trio.abc.ReceiveStream
    stderr: trio.abc.ReceiveStream | None
    stdin: trio.abc.SendStream | None = None
    _status: ExitStatus | None = None

    def exited(self) -> ExitStatus | None:
        if self._status is None:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            self._status = ExitStatus.of(info) if info is not None else None
        return self._status

    async def wait_exited(self) -> ExitStatus:
        await trio.lowlevel.checkpoint()
        while (status := self.exited()) is None:
            if self._pidfd is None:
                raise AssertionError(f"process {self.pid} was released before its exit was seen")
            await trio.lowlevel.wait_readable(self._pidfd)
        return status

    def signal_group(self, number: signal.Signals) -> bool:
        """Signal the group, unless the leader was reaped."""
        return self._pidfd is not None and group_signalled(self.pid, number)

    async def release(self, *, keep_running: bool = False) -> bool:
        if keep_running:
            raise AssertionError("a command outside a rollout can't leave processes running: no scope would end them")
        if self._pidfd is not None:
            self.signal_group(signal.SIGKILL)
            await self.wait_exited()
            os.close(self._pidfd)
            self._pidfd = None  # from here on nothing is signalled
        await self._process.wait()  # at once: the process is a zombie, or was reaped before
        return True

    def close(self) -> None:
        for stream in (self._process.stdout, self._process.stderr):
            if isinstance(stream, trio.lowlevel.FdStream):
                stream.close()


async def spawn_direct(command: Command) -> DirectChild:
    """Start ``command`` in a new session and process group, with the null device as stdin.

    Blocks for the start (a worker thread forks). Cancelled, the process is killed and reaped.

    Raises:
      SpawnError: the command could not be started.
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
    """Wrap a process that has just been started. No checkpoint comes before it has an owner."""
    if process.stdout is None:
        raise AssertionError("stdout was asked for as a pipe")
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        os.killpg(process.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True):  # bounded by the kill above
            await process.wait()
        raise SpawnError(f"process {process.pid} can't be watched: {error}", errno=error.errno) from error
    return DirectChild(process, pidfd, process.pid, process.stdout, process.stderr)
