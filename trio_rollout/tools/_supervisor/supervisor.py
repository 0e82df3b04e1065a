"""The host's side of the supervisor: commands that are contained, however far their descendants flee.

Owns the supervisor process of one rollout. It has no tasks: whoever waits for a command reads that command's own control
socket (``_supervised_child``). ``_supervisor_main`` has the other side.

What is below a process, as /proc tells it: for the host, where those who should end a tree have been stopped.
"""

import logging
import os
import signal
import socket
import subprocess  # ruff: ignore[suspicious-subprocess-import]  its constants only
import sys
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import final

import attrs
import trio

from .._commands.cleanup import WrapUp
from .._commands.command import Command
from .._errors import SpawnError, SupervisorLost
from .._limits import ExecLimits
from .child import PATIENCE_S, KeptCommands, SupervisedChild
from .descriptors import as_file, open_stdio, send_descriptors

_log = logging.getLogger("trio_rollout.tools")
_MAIN = Path(__file__).with_name("supervisor_main.py")


@final
@attrs.define(eq=False, repr=False)
class Supervisor:
    """Starts commands in a process of its own, which is started with the first one."""

    limits: ExecLimits
    teardown: float
    _kept: KeptCommands = attrs.field(init=False)
    _process: trio.Process | None = attrs.field(default=None, init=False)
    _requests: socket.socket | None = attrs.field(default=None, init=False)
    _starting: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _sending: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._kept = KeptCommands(self.limits.max_processes)

    @property
    def started(self) -> bool:
        """Whether there is anything to close."""
        return self._process is not None

    async def _start(self) -> socket.socket:
        async with self._starting:
            if self._requests is not None:
                return self._requests
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    self._process = await trio.lowlevel.open_process(
                        # Isolated, without site and bytecode: it starts in half the time and imports nobody's code.
                        [sys.executable, "-I", "-S", "-B", str(_MAIN), str(theirs.fileno())],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                        cwd="/",
                        env={},  # its commands can read what it has
                    )
                except OSError as error:  # without its errno, which would say something about a command
                    raise SpawnError(f"the supervisor can't be started: {error}") from error
                finally:
                    if self._process is None:
                        ours.close()
            ours.setblocking(False)  # ruff: ignore[boolean-positional-value-in-call]  it takes no keyword
            self._requests = ours
            return ours

    async def spawn(self, command: Command) -> SupervisedChild:
        """Start ``command``, contained.

        Blocks until it runs. Cancelled, it is killed with everything that came from it.

        Raises:
          SpawnError: it could not be started.
          SupervisorLost: the supervisor died, or did not start it within ``limits.start``.

        """
        with trio.move_on_after(self.limits.start):
            return await self._spawn(command)
        raise SupervisorLost(f"{command.argv[0]}: not started within {self.limits.start} s")

    async def _spawn(self, command: Command) -> SupervisedChild:
        requests = await self._start()
        self.rouse()
        child = await self._send(command, requests)
        try:
            await child.wait_spawned(command)
        except BaseException:
            with trio.move_on_after(self.teardown, shield=True):
                await child.release()
            child.close()
            raise
        return child

    async def _send(self, command: Command, requests: socket.socket) -> SupervisedChild:
        with ExitStack() as theirs, ExitStack() as ours:
            try:
                stdio = open_stdio(command, theirs, ours)
                control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.callback(control.close)
                theirs.callback(their_control.close)
                control.setblocking(False)  # ruff: ignore[boolean-positional-value-in-call]  it takes no keyword
                message = (as_file(command, theirs), their_control.fileno(), *stdio.theirs)
            except OSError as error:  # the host's: without its errno
                raise SpawnError(f"{command.argv[0]}: the host could not prepare its start: {error}") from error
            try:
                async with self._sending:
                    await send_descriptors(requests, message)
            except OSError as error:
                raise SupervisorLost(f"{command.argv[0]}: the supervisor is gone: {error}") from error
            ours.pop_all()
        return SupervisedChild(self.rouse, self._kept, control, stdio.owned, stdio.stdout, stdio.stderr, stdio.stdin)

    def rouse(self) -> None:
        """Let it go on, if it was stopped; it does the same for keepers. Commands that run as our user can stop both."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    async def close(self) -> None:
        """End whatever is left and wait until the supervisor has proven it by its own end.

        The caller shields and bounds it.
        """
        if self._process is None or self._requests is None:
            await trio.lowlevel.checkpoint()
            return
        self._kept.close()
        self._requests.close()  # which is its order to kill everything; whether or not we can wait for the proof
        status = await self._ended(self._process)
        if status != 0:
            _log.warning("the supervisor of a rollout's commands ended with status %d", status)

    async def _ended(self, process: trio.Process) -> int:
        while True:
            try:
                with trio.move_on_after(PATIENCE_S):
                    return await process.wait()
            finally:
                # Stopped, or busy: nothing below it has any business now, so the host helps. Cancelled, for the last time.
                if process.returncode is None:
                    kill_below(process.pid)
                    self.rouse()


async def end_supervisor(supervisor: Supervisor, teardown: float, wrap_up: WrapUp) -> None:
    """End whatever a supervisor has left; nothing if no command was ever started.

    Blocks until everything that was started is dead and reaped, in a shield of ``teardown`` seconds, less if ``wrap_up`` is
    hurried; what takes longer is logged, and killed by the supervisor whenever it can be.
    """
    if supervisor.started and not await wrap_up.shielded(supervisor.close, teardown):
        _log.warning("processes of a rollout were still alive %.1f s after they were killed", teardown)


@asynccontextmanager
async def open_supervisor(limits: ExecLimits, teardown: float, wrap_up: WrapUp) -> AsyncGenerator[Supervisor]:
    """Contain commands for the length of a block. Entering starts nothing; leaving blocks as ``end_supervisor`` does."""
    supervisor = Supervisor(limits, teardown)
    try:
        yield supervisor
    finally:
        await end_supervisor(supervisor, teardown, wrap_up)  # noqa: ASYNC102  it shields and bounds itself


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def kill_below(top: int) -> None:
    """SIGKILL to every descendant of ``top`` that is there now, and never to anybody else. ``top`` must be our child.

    What forks meanwhile may be missed: whoever needs to be sure asks again until ``top`` has nobody left to wait for.
    """
    parents = [top]
    while parents:
        parent = parents.pop()
        with suppress(OSError):  # it is gone, and what it had is above by now
            for child in _children(parent):
                parents.append(child)
                _kill(child, parent)


def _kill(pid: int, parent: int) -> None:
    with suppress(OSError):
        watched = os.pidfd_open(pid)
        try:
            if _parent(pid) == parent:  # else the id has passed to somebody else before it was watched
                signal.pidfd_send_signal(watched, signal.SIGKILL)
        finally:
            os.close(watched)
