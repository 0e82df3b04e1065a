"""The host's side of one supervised command: its streams, the messages from its keeper, and the orders to it. Linux only.

The command's side of each descriptor is closed here after it was sent. The host's side is a stream; ``SupervisedChild`` owns the
streams and the command's control socket. The keeper answers at once, whatever its command does; a keeper that does not was
stopped, and is continued.
"""

import errno
import logging
import os
import signal
import socket
import termios
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import final

import attrs
import trio

from .._commands.child import ExitStatus, group_signalled
from .._commands.command import Command, SpawnError, SupervisorLost


@final
@attrs.define(eq=False)
class Terminal(trio.abc.ReceiveStream):
    """The reading side of a pseudo-terminal's master. Linux reports its end as EIO; here it is an ordinary end."""

    _master: trio.lowlevel.FdStream

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return some output; empty once every process has closed the terminal."""
        try:
            return await self._master.receive_some(max_bytes)
        except trio.BrokenResourceError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO:
                return b""
            raise

    async def aclose(self) -> None:
        """Close the master, which hangs up on the command."""
        await self._master.aclose()


@final
@attrs.frozen(kw_only=True, eq=False)
class Stdio:
    """Both sides of a command's standard streams."""

    theirs: tuple[int, int, int]
    """Descriptors for the command: stdin, stdout, stderr."""
    owned: tuple[trio.lowlevel.FdStream, ...]
    """The host's streams, to be closed with the child."""
    stdout: trio.abc.ReceiveStream
    stderr: trio.abc.ReceiveStream | None
    stdin: trio.abc.SendStream | None


def _owned(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _stream(ours: ExitStack, descriptor: int) -> trio.lowlevel.FdStream:
    try:
        stream = trio.lowlevel.FdStream(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    ours.callback(stream.close)
    return stream


def _terminal(size: tuple[int, int], theirs: ExitStack, ours: ExitStack) -> Stdio:
    master, slave = os.openpty()
    _owned(theirs, slave)
    stream = _stream(ours, master)
    termios.tcsetwinsize(slave, size)
    return Stdio(theirs=(slave, slave, slave), owned=(stream,), stdout=Terminal(stream), stderr=None, stdin=stream)


def _pipe(theirs: ExitStack, ours: ExitStack) -> tuple[int, trio.lowlevel.FdStream]:
    read, write = os.pipe()
    _owned(theirs, write)
    return write, _stream(ours, read)


def open_stdio(command: Command, theirs: ExitStack, ours: ExitStack) -> Stdio:
    """Open the command's standard streams; each stack closes its side. Raises OSError if the host has none left."""
    if command.tty is not None:
        return _terminal(command.tty, theirs, ours)
    null = _owned(theirs, os.open(os.devnull, os.O_RDONLY))
    out_end, out = _pipe(theirs, ours)
    if command.merge_stderr:
        return Stdio(theirs=(null, out_end, out_end), owned=(out,), stdout=out, stderr=None, stdin=None)
    err_end, err = _pipe(theirs, ours)
    return Stdio(theirs=(null, out_end, err_end), owned=(out, err), stdout=out, stderr=err, stdin=None)


def as_file(command: Command, theirs: ExitStack) -> int:
    """Write the command to a file in memory: so a message to the supervisor is small and whole, however long the argv.

    ``Spec`` in ``supervisor_main`` reads the file.
    """
    fields = [
        str(command.umask),
        "" if command.tty is None else "tty",
        command.cwd,
        str(len(command.rlimits)),
        *(str(number) for limit in command.rlimits for number in limit),
        str(len(command.argv)),
        *command.argv,
        *(f"{name}={value}" for name, value in command.env.items()),
    ]
    descriptor = _owned(theirs, os.memfd_create("command"))
    with open(descriptor, "wb", closefd=False) as file:
        file.write(b"\0".join(os.fsencode(field) for field in fields))
    return descriptor


async def send_descriptors(connection: socket.socket, descriptors: tuple[int, ...]) -> None:
    """Send the descriptors as one message. Cancelled, none was sent. Raises OSError if the other side is gone."""
    await trio.lowlevel.checkpoint()
    while True:  # noqa: ASYNC913  a checkpoint comes just before; none may come after the send
        try:
            socket.send_fds(connection, [b"run"], descriptors)
        except BlockingIOError:
            await trio.lowlevel.wait_writable(connection)
        else:
            return


_log = logging.getLogger("trio_rollout.tools")

ANSWER_LIMIT_S = 1.0
"""Time to wait for an answer before the processes that should answer are continued: they may have been stopped."""


@final
@attrs.define(eq=False, repr=False)
class KeptCommands:
    """Keepers that go on after their command was released with leftovers: at most ``most``; the oldest ends for a new one."""

    most: int
    _controls: list[socket.socket] = attrs.field(factory=list, init=False)

    def __contains__(self, control: socket.socket) -> bool:
        return control in self._controls

    def add(self, control: socket.socket, descriptors: Sequence[int]) -> bool:
        """Take over a command's keeper, which discards the output at ``descriptors``; return False if the keeper is gone."""
        self._controls = [kept for kept in self._controls if not _has_ended(kept)]
        while len(self._controls) >= self.most:
            _log.info("a rollout keeps %d commands: the leftovers of its oldest command are ended", self.most)
            self._controls.pop(0).close()
        try:
            socket.send_fds(control, [b"keep"], list(descriptors))
        except OSError:
            return False
        self._controls.append(control)
        return True

    def close(self) -> None:
        """End the kept commands."""
        for control in self._controls:
            control.close()


def _has_ended(control: socket.socket) -> bool:
    """Return True if nothing of a kept command is left; its control socket is closed then."""
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
    """One command inside the supervisor (see ``Child``); its keeper process answers on ``_control``."""

    _resume_supervisor: Callable[[], None]
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
    _confirmed: bool = attrs.field(default=False, init=False)
    _lost: bool = attrs.field(default=False, init=False)

    def _read_messages(self) -> None:
        """Take in the keeper's messages that have arrived."""
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
                self._confirmed = True
            case _:
                raise SupervisorLost(f"the keeper of process {self.pid} sent an unknown message: {message!r}")

    async def _wait_message(self) -> None:
        """Wait for the keeper's next message. Raises SupervisorLost if the keeper is gone."""
        if self._lost:
            raise SupervisorLost(
                f"the keeper of process {self.pid} is gone; its supervisor kills the processes it had, unless the command has "
                "killed that too: then they live on"
            )
        await trio.lowlevel.wait_readable(self._control)
        self._read_messages()

    async def _wait_answer(self) -> None:
        """Wait as above for a message that should come at once; if it is late, continue what may have been stopped."""
        with trio.move_on_after(ANSWER_LIMIT_S):
            await self._wait_message()
            return
        self._resume_supervisor()
        if self._keeper:
            with suppress(ProcessLookupError):
                os.kill(self._keeper, signal.SIGCONT)  # its control socket is open: it lives. Its parent may be dead

    async def wait_spawned(self, command: Command) -> None:
        """Wait until the command runs. Raises SpawnError if it could not be started."""
        await trio.lowlevel.checkpoint()
        self._read_messages()
        while not self.pid:
            if self._failed is not None:
                number, text = self._failed
                raise SpawnError(f"{command.argv[0]}: could not be started: {text}", errno=number)
            await self._wait_answer()

    def exited(self) -> ExitStatus | None:
        self._read_messages()
        return self._status

    async def wait_exited(self) -> ExitStatus:
        await trio.lowlevel.checkpoint()
        while (status := self.exited()) is None:
            await self._wait_message()
        return status

    def signal_group(self, number: signal.Signals) -> bool:
        """Signal the group, as long as its keeper holds the group's id."""
        self._read_messages()
        held = self.pid and not self._released and not self._lost
        return bool(held) and group_signalled(self.pid, number)

    async def release(self, *, keep_running: bool = False) -> bool:
        """Have the keeper kill everything that came from the command, also descendants that left its group.

        With ``keep_running`` the keeper goes on with the leftovers until the supervisor is closed, or too many are kept.
        """
        await trio.lowlevel.checkpoint()
        if keep_running and not self._released:
            descriptors = [stream.fileno() for stream in self._streams]
            self._released = self._confirmed = self._kept.add(self._control, descriptors)
        if not self._released:
            self._released = True
            self._send(b"release")
        while not self._confirmed and not self._lost:
            await self._wait_answer()
        return self._confirmed

    def _send(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except OSError:
            self._lost = True  # the supervisor has its orphans now

    def close(self) -> None:
        """Close the streams and the control socket, which also ends a command that was not released."""
        for stream in self._streams:
            stream.close()
        if self._control not in self._kept:
            self._control.close()
