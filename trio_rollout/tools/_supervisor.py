"""The host's side of the supervisor: commands that are contained, however far their descendants flee.

Owns the supervisor process of one rollout and the control sockets of commands whose leftovers are kept. It has no tasks:
whoever waits for a command reads that command's own control socket. ``_supervisor_main`` has the other side.
"""

import logging
import os
import signal
import socket
import subprocess  # ruff: ignore[suspicious-subprocess-import]  its constants only
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import final

import attrs
import trio

from ._child import ExitStatus
from ._command import Command
from ._descriptors import as_file, open_stdio, send_descriptors
from ._errors import SpawnError, SupervisorLost
from ._wrap_up import WrapUp

_log = logging.getLogger("trio_rollout.tools")
_MAIN = Path(__file__).with_name("_supervisor_main.py")


@final
@attrs.define(eq=False, repr=False)
class SupervisedChild:
    """One command inside the supervisor; its keeper process answers on ``_control``."""

    _supervisor: "Supervisor"
    _control: socket.socket
    _streams: tuple[trio.lowlevel.FdStream, ...]
    stdout: trio.abc.ReceiveStream
    stderr: trio.abc.ReceiveStream | None
    stdin: trio.abc.SendStream | None
    pid: int = attrs.field(default=0, init=False)
    _failed: tuple[int | None, str] | None = attrs.field(default=None, init=False)
    _status: ExitStatus | None = attrs.field(default=None, init=False)
    _released: bool = attrs.field(default=False, init=False)
    _proven: bool = attrs.field(default=False, init=False)
    _lost: bool = attrs.field(default=False, init=False)

    def _hear(self) -> None:
        """Take in what the keeper has said so far."""
        while not self._lost and self._control.fileno() >= 0:
            try:
                message = self._control.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if message:
                self._take(message)
            else:
                self._lost = True

    def _take(self, message: bytes) -> None:
        match message.decode(errors="replace").split(" ", 2):
            case ["spawned", pid]:
                self.pid = int(pid)
            case ["failed", number, text]:
                self._failed = (int(number) or None, text)
            case ["exited", code]:
                self._status = ExitStatus(int(code)) if int(code) >= 0 else ExitStatus(None, -int(code))
            case ["released"]:
                self._proven = True
            case _:
                raise SupervisorLost(f"the keeper of process {self.pid} said {message!r}, which means nothing")

    async def _heard(self) -> None:
        """Wait until the keeper says something more.

        Raises:
          SupervisorLost: it is gone.

        """
        if self._lost:
            raise SupervisorLost(f"the keeper of process {self.pid} is gone; its supervisor kills what it had")
        await trio.lowlevel.wait_readable(self._control)
        self._hear()

    async def wait_spawned(self, command: Command) -> None:
        """Wait until the command runs.

        Raises:
          SpawnError: it could not be started.

        """
        await trio.lowlevel.checkpoint()
        self._hear()
        while not self.pid:
            if self._failed is not None:
                number, text = self._failed
                raise SpawnError(f"{command.argv[0]}: could not be started: {text}", errno=number)
            await self._heard()

    def exited(self) -> ExitStatus | None:
        """How the leader ended, if it has."""
        self._hear()
        return self._status

    async def wait_exited(self) -> ExitStatus:
        """Wait for the leader's exit."""
        await trio.lowlevel.checkpoint()
        while (status := self.exited()) is None:
            await self._heard()
        return status

    def signal_group(self, number: signal.Signals) -> bool:
        """Signal the group, as long as its keeper is there to hold its id."""
        self._hear()
        if self._released or self._lost or not self.pid:
            return False
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    async def release(self, *, spare: bool = False) -> bool:
        """Have the keeper kill everything that came from the command, also what left its group.

        With ``spare`` the keeper goes on with what is left until the supervisor is closed.
        """
        await trio.lowlevel.checkpoint()
        if spare and not self._released:
            self._supervisor.keep(self._control, [stream.fileno() for stream in self._streams])
            self._released = self._proven = True
        if not self._released:
            self._released = True
            self._tell(b"release")
        while not self._proven and not self._lost:
            await trio.lowlevel.wait_readable(self._control)
            self._hear()
        return self._proven

    def _tell(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except OSError:
            self._lost = True  # its orphans are the supervisor's now

    def close(self) -> None:
        """Close the streams and the control socket, which also ends whatever was not released."""
        for stream in self._streams:
            stream.close()
        if not self._supervisor.keeps(self._control):
            self._control.close()


@final
@attrs.define(eq=False, repr=False)
class Supervisor:
    """Starts commands in a process of its own, which is started with the first one."""

    teardown: float
    _process: trio.Process | None = attrs.field(default=None, init=False)
    _requests: socket.socket | None = attrs.field(default=None, init=False)
    _starting: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _sending: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _kept: list[socket.socket] = attrs.field(factory=list, init=False)

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
                    )
                except OSError as error:
                    raise SpawnError(f"the supervisor can't be started: {error}", errno=error.errno) from error
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
          SupervisorLost: the supervisor died.

        """
        requests = await self._start()
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
            except OSError as error:
                raise SpawnError(f"{command.argv[0]}: {error}", errno=error.errno) from error
            try:
                async with self._sending:
                    await send_descriptors(requests, message)
            except OSError as error:
                raise SupervisorLost(f"{command.argv[0]}: the supervisor is gone: {error}") from error
            ours.pop_all()
        return SupervisedChild(self, control, stdio.owned, stdio.stdout, stdio.stderr, stdio.stdin)

    def keep(self, control: socket.socket, descriptors: Sequence[int]) -> None:
        """Take over a command's keeper, which reads on what is written to ``descriptors``."""
        socket.send_fds(control, [b"keep"], list(descriptors))
        self._kept.append(control)

    def keeps(self, control: socket.socket) -> bool:
        """Whether this keeper was taken over."""
        return control in self._kept

    async def close(self) -> None:
        """End whatever is left and wait until the supervisor has proven it by its own end.

        The caller shields and bounds it.
        """
        if self._process is None or self._requests is None:
            await trio.lowlevel.checkpoint()
            return
        for control in self._kept:
            control.close()
        self._requests.close()  # which is its order to kill everything; whether or not we can wait for the proof
        status = await self._process.wait()
        if status != 0:
            _log.warning("the supervisor of a rollout's commands ended with status %d", status)


async def end_supervisor(supervisor: Supervisor, teardown: float, wrap_up: WrapUp) -> None:
    """End whatever a supervisor has left; nothing if no command was ever started.

    Blocks until everything that was started is dead and reaped, in a shield of ``teardown`` seconds, less if ``wrap_up`` is
    hurried; what takes longer is logged, and killed by the supervisor whenever it can be.
    """
    if supervisor.started and not await wrap_up.shielded(supervisor.close, teardown):
        _log.warning("processes of a rollout were still alive %.1f s after they were killed", teardown)


@asynccontextmanager
async def open_supervisor(teardown: float, wrap_up: WrapUp) -> AsyncGenerator[Supervisor]:
    """Contain commands for the length of a block. Entering starts nothing; leaving blocks as ``end_supervisor`` does."""
    supervisor = Supervisor(teardown)
    try:
        yield supervisor
    finally:
        await end_supervisor(supervisor, teardown, wrap_up)  # noqa: ASYNC102  it shields and bounds itself
