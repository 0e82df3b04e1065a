"""Non-blocking stdlib sockets behind the port of five calls.

Not trio's SocketStream: that costs a lock, a conflict detector and a checkpoint per call, and it can't say "nothing yet".

A tunnel through an HTTP proxy (CONNECT): what comes out is a socket like any other, for http and https alike.
"""

import errno
import os
import re
import socket
from collections.abc import Awaitable
from typing import Final, final

import trio

from .._util.time import wait_s
from .address import Address

# A full accept queue of a unix socket refuses at once with EAGAIN, where TCP would let the connect wait.
_UNIX_RETRY_S = 0.01


@final
class SocketConnection:
    """A connected, non-blocking stream socket."""

    # Its socket and nothing else: with bound methods in place of lookups a connection is six more objects, and whatever is
    # alive for each rollout in flight is visited by the garbage collector again and again.
    __slots__ = ("_socket",)

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send_now(self, data: bytes | memoryview, /) -> int:
        """See ``Connection``."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        """See ``Connection``."""
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    # Plain functions, which return the coroutine: one less for each wait.
    def wait_readable(self) -> Awaitable[None]:
        """See ``Connection``."""
        return trio.lowlevel.wait_readable(self._socket)  # noqa: ASYNC105  its caller awaits it

    def wait_writable(self) -> Awaitable[None]:
        """See ``Connection``."""
        return trio.lowlevel.wait_writable(self._socket)  # noqa: ASYNC105  its caller awaits it

    def close(self) -> None:
        """See ``Connection``."""
        self._socket.close()


async def _finish_connect(sock: socket.socket, where: tuple[object, ...] | str) -> None:
    while (error := sock.connect_ex(where)) == errno.EAGAIN and sock.family == socket.AF_UNIX:
        await wait_s(_UNIX_RETRY_S)
    if error in {errno.EINPROGRESS, errno.EINTR}:
        await trio.lowlevel.wait_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    # A closed port in the ephemeral range can be connected to itself; that is nobody's server.
    if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError("connected to itself: nobody listens there")


async def _connect(family: int, kind: int, where: tuple[object, ...] | str) -> socket.socket:
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)  # ruff: ignore[boolean-positional-value-in-call]  socket's own signature
        await _finish_connect(sock, where)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


async def open_socket(address: Address) -> socket.socket:
    """Connect to a server over TCP (each of its IP addresses in turn) or over a unix socket.

    Blocks until connected; has no deadline of its own. Cancelled or failed, no socket stays open.

    Raises:
      OSError: the name is unknown, or no address could be connected to; the last address's reason.

    """
    if address.unix_path is not None:
        return await _connect(socket.AF_UNIX, socket.SOCK_STREAM, address.unix_path)
    found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    last: OSError = OSError(f"{address.host} has no address")
    for family, kind, _, _, where in found:
        try:
            return await _connect(family, kind, where)
        except OSError as error:
            last = error
    raise last


_HEAD_LIMIT: Final = 16384
_BLANK_LINE: Final = b"\r\n\r\n"
_ACCEPTED: Final = re.compile(rb"HTTP/1\.[01] 2\d\d[ \r]")


async def open_tunnel(proxy: Address, address: Address) -> socket.socket:
    """Connect to a server by way of a proxy.

    Blocks until the proxy has connected; has no deadline of its own. Cancelled or failed, no socket stays open.

    Raises:
      OSError: the proxy can't be reached, or will not connect; with what it said.

    """
    sock = await open_socket(proxy)
    try:
        await _ask(sock, proxy, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _ask(sock: socket.socket, proxy: Address, address: Address) -> None:
    host = f"[{address.host}]" if ":" in address.host else address.host
    request = f"CONNECT {host}:{address.port} HTTP/1.1\r\nhost: {host}:{address.port}\r\n\r\n".encode("ascii")
    stream = trio.socket.from_stdlib_socket(sock)
    while request:
        request = request[await stream.send(request) :]
    said = b""
    while _BLANK_LINE not in said:
        received = await stream.recv(_HEAD_LIMIT)
        said += received
        if not received or len(said) > _HEAD_LIMIT:
            raise OSError(f"the proxy {proxy.url} did not answer CONNECT {host}:{address.port}; it said {said[:200]!r}")
    # Behind the proxy nobody speaks before he is asked, so there is nothing behind the blank line.
    if not _ACCEPTED.match(said):
        line = said.partition(b"\r\n")[0].decode("latin-1")
        raise OSError(f"the proxy {proxy.url} refused CONNECT {host}:{address.port}: {line}")
