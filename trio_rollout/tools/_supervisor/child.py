"""The host's side of one supervised command: what its keeper says, and what it is told.

Owns the command's control socket and its streams. The keeper answers at once, whatever its command does; where it does not,
it was stopped, and is told to go on.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import attrs
import trio

from .._commands.child import ExitStatus
from .._commands.command import Command
from .._errors import SpawnError, SupervisorLost

_log = logging.getLogger("trio_rollout.tools")

PATIENCE_S = 1.0
"""How long an answer is awaited before those who owe it are told to go on: they may have been stopped."""


@final
@attrs.define(eq=False, repr=False)
class KeptCommands:
    """Keepers that go on after their command was left: at most ``most``, for one more the oldest is ended."""

    most: int
    _controls: list[socket.socket] = attrs.field(factory=list, init=False)

    def __contains__(self, control: socket.socket) -> bool:
        return control in self._controls

    def add(self, control: socket.socket, descriptors: Sequence[int]) -> bool:
        """Take over a command's keeper, which reads on what is written to ``descriptors``; False if it is gone."""
        self._controls = [kept for kept in self._controls if not _is_over(kept)]
        while len(self._controls) >= self.most:
            _log.info("a rollout keeps %d commands: the leftovers of its oldest one are ended", self.most)
            self._controls.pop(0).close()
        try:
            socket.send_fds(control, [b"keep"], list(descriptors))
        except OSError:
            return False
        self._controls.append(control)
        return True

    def close(self) -> None:
        """End them."""
        for control in self._controls:
            control.close()


def _is_over(control: socket.socket) -> bool:
    """Whether nothing is left of a kept command; its control socket is closed then."""
    try:
        while control.recv(64) not in {b"", b"released"}:
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    control.close()
    return True


@final
@attrs.define(eq=False, repr=False)
class SupervisedChild:
    """One command inside the supervisor; its keeper process answers on ``_control``."""

    _rouse: Callable[[], None]
    _kept: KeptCommands
    _control: socket.socket
    _streams: tuple[trio.lowlevel.FdStream, ...]
    stdout: trio.abc.ReceiveStream
    stderr: trio.abc.ReceiveStream | None
    stdin: trio.abc.SendStream | None
    pid: int = attrs.field(default=0, init=False)
    _keeper: int = attrs.field(default=0, init=False)
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
            case ["spawned", pid, keeper]:
                self.pid, self._keeper = int(pid), int(keeper)
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

    async def _answered(self) -> None:
        """Wait for what comes at once, unless the command has stopped those who should say it: then they go on.

        Raises:
          SupervisorLost: the keeper is gone.

        """
        with trio.move_on_after(PATIENCE_S):
            await self._heard()
            return
        self._rouse()
        if self._keeper:
            with suppress(ProcessLookupError):
                os.kill(self._keeper, signal.SIGCONT)  # its control socket is open: it lives. Its parent may be dead

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
            await self._answered()

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

        With ``spare`` the keeper goes on with what is left until the supervisor is closed, or too many are kept.
        """
        await trio.lowlevel.checkpoint()
        if spare and not self._released:
            self._released = self._proven = self._kept.add(self._control, [stream.fileno() for stream in self._streams])
        if not self._released:
            self._released = True
            self._tell(b"release")
        while not self._proven and not self._lost:
            await self._answered()
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
        if self._control not in self._kept:
            self._control.close()
