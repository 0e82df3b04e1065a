"""TLS behind the port of five calls: the stdlib's ``ssl`` on the same non-blocking socket.

Not httpx, so that an ``https`` request can be left, aborted and read on like any other.
"""

import socket
import ssl
from typing import final

import trio

from .address import Address
from .connection import Connection, Connector
from .sockets import SocketConnection, open_socket, open_tunnel


@final
class TlsConnection:
    """A TLS stream whose handshake is done."""

    __slots__ = ("_read_wants_write", "_stream", "_write_wants_read")

    def __init__(self, stream: ssl.SSLSocket) -> None:
        self._stream = stream
        # TLS may have to write to read and the other way round (key updates); waiting must then be for the other thing.
        self._read_wants_write = False
        self._write_wants_read = False

    def send_now(self, data: bytes | memoryview, /) -> int:
        """See ``Connection``. After a 0 the next call must bring the same bytes, which is how an exchange sends."""
        self._write_wants_read = False
        try:
            return self._stream.send(data)
        except ssl.SSLWantWriteError:
            return 0
        except ssl.SSLWantReadError:
            self._write_wants_read = True
            return 0

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        """See ``Connection``."""
        self._read_wants_write = False
        try:
            return self._stream.recv_into(buffer)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLWantWriteError:
            self._read_wants_write = True
            return None

    async def wait_readable(self) -> None:
        """See ``Connection``."""
        if self._stream.pending():  # decrypted already: the socket itself may stay silent
            await trio.lowlevel.checkpoint()
            return
        if self._read_wants_write:
            await trio.lowlevel.wait_writable(self._stream)
        else:
            await trio.lowlevel.wait_readable(self._stream)

    async def wait_writable(self) -> None:
        """See ``Connection``."""
        if self._write_wants_read:
            await trio.lowlevel.wait_readable(self._stream)
        else:
            await trio.lowlevel.wait_writable(self._stream)

    def close(self) -> None:
        """See ``Connection``. Without a goodbye: a server must cope with clients that vanish."""
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
    """Shake hands over a connected socket, which is taken over, and verify the server's certificate.

    Blocks until that is done; has no deadline of its own. Cancelled or failed, the socket is closed.

    Raises:
      OSError: its certificate is not accepted.

    """
    try:
        stream = context.wrap_socket(sock, server_hostname=address.host, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    try:
        await _handshake(stream)
    except BaseException:
        stream.close()
        raise
    return TlsConnection(stream)


def _context_over(sock: socket.socket, ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except BaseException:
        sock.close()
        raise


def socket_connector(ca_file: str | None = None, proxy: Address | None = None) -> Connector:
    """A connector over real sockets, through ``proxy`` if there is one; a unix socket needs none.

    ``ca_file``: certificates to trust for https in place of the system's.
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
            context = _context_over(sock, ca_file)
        return await connect_tls(sock, address, context)

    return connect
