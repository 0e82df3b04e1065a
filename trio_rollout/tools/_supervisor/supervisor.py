"""The host's side of the supervisor: it starts contained commands, and ends all of them.

``Supervisor`` owns the supervisor process of one rollout. It has no tasks: the task that waits for a command reads the
command's own control socket (``child.py``). ``supervisor_main.py`` is the other side, and has the design.

At the end the host may have to help: a command can stop the processes that should end its tree. So the host then kills what
``/proc`` shows below the supervisor, as often as needed (docs/decisions/0020-a-command-may-turn-on-its-keeper.md).
"""

import logging
import signal
import socket
import subprocess  # ruff: ignore[suspicious-subprocess-import]  its constants only
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import final

import attrs
import trio

from ..._util.process_tree import kill_descendants
from .._cleanup import CleanupBudget
from .._commands.command import Command, SpawnError, SupervisorLost
from .._limits import ExecLimits
from .child import ANSWER_LIMIT_S, KeptCommands, SupervisedChild, as_file, open_stdio, send_descriptors

_log = logging.getLogger("trio_rollout.tools")
_MAIN = Path(__file__).with_name("supervisor_main.py")


@final
@attrs.define(eq=False, repr=False)
class Supervisor:
    """Starts commands below a separate process, which is started with the first command."""

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
        """True once the process was started: then it has to be closed."""
        return self._process is not None

    async def _start(self) -> socket.socket:
        async with self._starting:
            if self._requests is not None:
                return self._requests
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    self._process = await trio.lowlevel.open_process(
                        # Isolated, without site and bytecode: this halves the start and imports no foreign code.
                        [sys.executable, "-I", "-S", "-B", str(_MAIN), str(theirs.fileno())],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                        cwd="/",
                        env={},  # commands can read the environment of this process
                    )
                except OSError as error:  # without its errno, which would blame the command
                    raise SpawnError(f"the supervisor can't be started: {error}") from error
                finally:
                    if self._process is None:
                        ours.close()
            ours.setblocking(False)  # ruff: ignore[boolean-positional-value-in-call]  it takes no keyword
            self._requests = ours
            return ours

    async def spawn(self, command: Command) -> SupervisedChild:
        """Start ``command``, contained.

        Blocks until the command runs. Cancelled, the command is killed with everything that came from it.

        Raises:
          SpawnError: the command could not be started.
          SupervisorLost: the supervisor died, or did not start the command within ``limits.start``.
        """
        with trio.move_on_after(self.limits.start):
            return await self._spawn(command)
        raise SupervisorLost(f"{command.argv[0]}: not started within {self.limits.start} s")

    async def _spawn(self, command: Command) -> SupervisedChild:
        requests = await self._start()
        self.resume_stopped()
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
            except OSError as error:  # the host's failure: without its errno
                raise SpawnError(f"{command.argv[0]}: the host could not prepare the start: {error}") from error
            try:
                async with self._sending:
                    await send_descriptors(requests, message)
            except OSError as error:
                raise SupervisorLost(f"{command.argv[0]}: the supervisor is gone: {error}") from error
            ours.pop_all()
        return SupervisedChild(
            self.resume_stopped, self._kept, control, stdio.owned, stdio.stdout, stdio.stderr, stdio.stdin
        )

    def resume_stopped(self) -> None:
        """Continue the supervisor if it was stopped; it does the same for keepers. Commands run as the same user and can stop both."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    async def end(self, cleanup: CleanupBudget) -> None:
        """End every process that is left; does nothing if no command was ever started.

        Blocks until everything that was started is dead and reaped, in a shield of ``teardown`` seconds, or of ``cleanup``'s
        time once that has started. Processes that take longer are logged; the supervisor kills them when it can.
        """
        if self.started and not await cleanup.shielded(self.close, self.teardown):
            _log.warning("processes of a rollout were still alive %.1f s after they were killed", self.teardown)

    async def close(self) -> None:
        """End every command that is left and wait for the supervisor's exit, which confirms it.

        The caller shields and bounds the call.
        """
        if self._process is None or self._requests is None:
            await trio.lowlevel.checkpoint()
            return
        self._kept.close()
        self._requests.close()  # the order to kill everything, also if the caller can't wait for the confirmation
        status = await self._ended(self._process)
        if status != 0:
            _log.warning("the supervisor of a rollout's commands ended with status %d", status)

    async def _ended(self, process: trio.Process) -> int:
        while True:
            try:
                with trio.move_on_after(ANSWER_LIMIT_S):
                    return await process.wait()
            finally:
                # Stopped, or busy: no process below it is needed now, so the host helps. Cancelled, for the last time.
                if process.returncode is None:
                    kill_descendants(process.pid)
                    self.resume_stopped()
