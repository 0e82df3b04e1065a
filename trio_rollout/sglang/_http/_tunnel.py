"""A tunnel through an HTTP proxy (CONNECT): what comes out is a socket like any other, for http and https alike."""

import re
import socket
from typing import Final

import trio

from ._address import Address
from ._sockets import open_socket

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
