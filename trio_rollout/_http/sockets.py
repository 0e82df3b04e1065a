"""Production connections: non-blocking stdlib sockets, and TLS over them, behind the port of five calls.

Not Trio's SocketStream: that costs a lock, a conflict detector and a checkpoint for each call, and cannot say "nothing yet".
TLS is the stdlib's ``ssl`` on the same socket and not httpx, so that an ``https`` request can be left, aborted and read on
like any other (docs/decisions/0010-https-goes-over-the-same-connections.md). A server behind an HTTP proxy is reached through a
tunnel (CONNECT), which is a socket like any other, for http and https alike (docs/decisions/0016-a-proxy-is-a-tunnel.md).
"""

import errno
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from typing import Final, final

import trio

from .._util.time import wait_s
from .connection import Address, Connection, Connector

# A full accept queue of a unix socket refuses at once with EAGAIN, where TCP would let the connect wait.
_UNIX_RETRY_S = 0.01
# A proxy's answer to CONNECT.
_HEAD_LIMIT: Final = 16384
_BLANK_LINE: Final = b"\r\n\r\n"
_ACCEPTED: Final = re.compile(rb"HTTP/1\.[01] 2\d\d[ \r]")


@final
class SocketConnection:
    """A connected, non-blocking stream socket. For its methods see ``Connection``."""

    # The socket and nothing else: bound methods in place of lookups would make six more objects of a connection, and the
    # garbage collector visits everything that is alive for each rollout in flight, again and again.
    __slots__ = ("_socket",)

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send_now(self, data: bytes | memoryview, /) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    # Plain functions that return the coroutine: one coroutine less for each wait.
    def wait_readable(self) -> Awaitable[None]:
        return trio.lowlevel.wait_readable(self._socket)  # noqa: ASYNC105  its caller awaits it

    def wait_writable(self) -> Awaitable[None]:
        return trio.lowlevel.wait_writable(self._socket)  # noqa: ASYNC105  its caller awaits it

    def close(self) -> None:
        self._socket.close()


@contextmanager
def _closed_on_error(sock: socket.socket) -> Generator[None]:
    """Close the socket if the block fails or is cancelled."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


async def _finish_connect(sock: socket.socket, where: tuple[object, ...] | str) -> None:
    while (error := sock.connect_ex(where)) == errno.EAGAIN and sock.family == socket.AF_UNIX:
        await wait_s(_UNIX_RETRY_S)
    if error in {errno.EINPROGRESS, errno.EINTR}:
        await trio.lowlevel.wait_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    # A closed port in the ephemeral range can be connected to itself; no server listens there.
    if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError("connected to itself: no server listens there")


async def _connect(family: int, kind: int, where: tuple[object, ...] | str) -> socket.socket:
    sock = socket.socket(family, kind)
    with _closed_on_error(sock):
        sock.setblocking(False)  # ruff: ignore[boolean-positional-value-in-call]  socket's own signature
        await _finish_connect(sock, where)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def open_socket(address: Address) -> socket.socket:
    """Connect to a server over TCP (each of its IP addresses in turn) or over a unix socket.

    Blocks until connected, without a deadline. Cancelled or failed, no socket stays open.

    Raises:
      OSError: the name is unknown, or no address could be connected to (the error of the last one).
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


async def open_tunnel(proxy: Address, address: Address) -> socket.socket:
    """Connect to a server through a proxy.

    Blocks until the proxy has connected, without a deadline. Cancelled or failed, no socket stays open.

    Raises:
      OSError: the proxy cannot be reached, or refuses; the message has its answer.
    """
    sock = await open_socket(proxy)
    with _closed_on_error(sock):
        await _ask(sock, proxy, address)
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
    # The server behind the proxy speaks only when asked, so nothing follows the blank line.
    if not _ACCEPTED.match(said):
        line = said.partition(b"\r\n")[0].decode("latin-1")
        raise OSError(f"the proxy {proxy.url} refused CONNECT {host}:{address.port}: {line}")


@final
class TlsConnection:
    """A TLS stream after its handshake. For its methods see ``Connection``."""

    __slots__ = ("_read_wait", "_stream", "_write_wait")

    def __init__(self, stream: ssl.SSLSocket) -> None:
        self._stream = stream
        # TLS may have to write in order to read, and read in order to write (key updates); then the other one is awaited.
        self._read_wait = trio.lowlevel.wait_readable
        self._write_wait = trio.lowlevel.wait_writable

    def send_now(self, data: bytes | memoryview, /) -> int:
        """After a 0 the next call must bring the same bytes, as an exchange does."""
        self._write_wait = trio.lowlevel.wait_writable
        try:
            return self._stream.send(data)
        except ssl.SSLWantWriteError:
            return 0
        except ssl.SSLWantReadError:
            self._write_wait = trio.lowlevel.wait_readable
            return 0

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        self._read_wait = trio.lowlevel.wait_readable
        try:
            return self._stream.recv_into(buffer)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLWantWriteError:
            self._read_wait = trio.lowlevel.wait_writable
            return None

    async def wait_readable(self) -> None:
        if self._stream.pending():  # decrypted already: the socket itself may stay silent
            await trio.lowlevel.checkpoint()
        else:
            await self._read_wait(self._stream)

    async def wait_writable(self) -> None:
        await self._write_wait(self._stream)

    def close(self) -> None:
        """No TLS close message is sent: servers must cope with clients that vanish."""
        self._stream.close()


async def _handshake(stream: ssl.SSLSocket) -> None:
    while True:
        try:
            stream.do_handshake()
        except ssl.SSLWantReadError:
            wait = trio.lowlevel.wait_readable
        except ssl.SSLWantWriteError:
            wait = trio.lowlevel.wait_writable
        else:
            return
        await wait(stream)


async def connect_tls(sock: socket.socket, address: Address, context: ssl.SSLContext) -> TlsConnection:
    """Do the TLS handshake over a connected socket, which is taken over, and verify the server's certificate.

    Blocks until that is done, without a deadline. Cancelled or failed, the socket is closed.

    Raises:
      OSError: the handshake failed, or the certificate is not accepted.
    """
    with _closed_on_error(sock):
        stream = context.wrap_socket(sock, server_hostname=address.host, do_handshake_on_connect=False)
    with _closed_on_error(stream):
        await _handshake(stream)
    return TlsConnection(stream)


def socket_connector(ca_file: str | None = None, proxy: Address | None = None) -> Connector:
    """Return a connector over real sockets.

    TCP connections go through ``proxy`` if there is one, unix sockets never. ``ca_file``: certificates to trust for https in
    place of the system's.
    """
    context: ssl.SSLContext | None = None

    async def connect(address: Address) -> Connection:
        nonlocal context
        if proxy is None or address.unix_path is not None:
            sock = await open_socket(address)
        else:
            sock = await open_tunnel(proxy, address)
        if not address.tls:
            return SocketConnection(sock)
        if context is None:  # reading the system's certificates takes some 20 ms: not unless they are needed
            with _closed_on_error(sock):
                context = ssl.create_default_context(cafile=ca_file)
        return await connect_tls(sock, address, context)

    return connect
