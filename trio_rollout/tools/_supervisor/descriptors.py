"""Pipes, terminals and the passing of descriptors to another process. Linux only.

The command's side of each descriptor is closed here after it was sent. The host's side is a stream, which the owner of the
child closes.
"""

import errno
import os
import socket
import termios
from contextlib import ExitStack
from typing import final

import attrs
import trio

from .._commands.command import Command


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
                return b""  # noqa: ASYNC910  the wait for the error was a checkpoint
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
    """Open the command's standard streams; each stack closes its side.

    Raises:
      OSError: the host has no descriptors or terminals left.

    """
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
    """Send the descriptors as one message. Cancelled, none was sent.

    Raises:
      OSError: the other side is gone.

    """
    await trio.lowlevel.checkpoint()
    while True:  # noqa: ASYNC913  a checkpoint comes just before; none may come after the send
        try:
            socket.send_fds(connection, [b"run"], descriptors)
        except BlockingIOError:
            await trio.lowlevel.wait_writable(connection)
        else:
            return
