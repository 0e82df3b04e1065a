"""A small forward proxy: one request a connection, checked, then bytes both ways. HTTP/1.1 on the loopback interface.

The proxy speaks CONNECT, for TLS, and absolute-form requests, for plain HTTP. The bytes after the head are not read, and go to
the server that was checked and to no other.
"""

import base64
import binascii
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias, final
from urllib.parse import urlsplit

import attrs
import trio

from ..._http import server_reader
from ..._util.user_code import logging_failures

_log = logging.getLogger("trio_rollout.tools")

_HEAD_TIME = 10.0
_CONNECT_TIME = 30.0
_TLS_PORT, _PLAIN_PORT = 443, 80
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


@attrs.frozen
class Target:
    """The host and port that a request names."""

    host: str
    port: int


Check: TypeAlias = Callable[[str | None, Target], str | None]
"""Returns the reason why a token may not reach a target, None if it may. PermissionError: there is no such token."""


@final
class Request:
    """The head of a request to the proxy.

    Raises:
      ValueError: the request names no host that this proxy can reach.

    """

    def __init__(self, head: server_reader.Request) -> None:
        self._url = head.target
        self.headers = head.headers
        self.method = head.method.encode("ascii")
        self.target = self._target()

    @property
    def is_tunnel(self) -> bool:
        """True for a request for bytes both ways, as TLS needs."""
        return self.method == b"CONNECT"

    def _target(self) -> Target:
        text = self._url.decode("ascii")
        url = urlsplit("//" + text if self.is_tunnel else text)
        if not url.hostname or url.scheme != ("" if self.is_tunnel else "http"):
            raise ValueError(f"{text!r} names no host that this proxy can reach")
        return Target(url.hostname, url.port or (_TLS_PORT if self.is_tunnel else _PLAIN_PORT))

    def token(self) -> str | None:
        """Return the password of the request's proxy authorization."""
        for name, value in self.headers:
            scheme, _, credentials = value.partition(b" ")
            if name.lower() == b"proxy-authorization" and scheme.lower() == b"basic":
                with suppress(binascii.Error, UnicodeDecodeError):
                    return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
        return None

    def for_the_server(self) -> bytes:
        """Return the head for the server: in origin form, without the headers for the proxy."""
        url = urlsplit(self._url)
        path = (url.path or b"/") + (b"?" + url.query if url.query else b"")
        kept = [header for header in self.headers if not header[0].lower().startswith((b"proxy-", b"connection"))]
        lines = [b"%b: %b" % header for header in [*kept, (b"Connection", b"close")]]
        return b"\r\n".join([b"%b %b HTTP/1.1" % (self.method, path), *lines, b"", b""])


async def serve_proxy_connection(stream: trio.SocketStream, check: Check) -> None:
    """Serve one connection to its end. Never raises for the behaviour of a client or a server."""
    with logging_failures(_log, "a connection to the sandbox proxy failed"):  # it must not end the network of others
        async with stream:
            with suppress(*_GONE):
                await _serve(stream, check)
    await trio.lowlevel.checkpoint()


async def _serve(stream: trio.SocketStream, check: Check) -> None:
    try:
        with trio.fail_after(_HEAD_TIME):
            request, rest = await _read_head(stream)
        refusal = check(request.token(), request.target)
    except (ValueError, trio.TooSlowError) as error:
        await _answer(stream, b"400 Bad Request", str(error))
        return
    except PermissionError as error:
        await _answer(stream, b"407 Proxy Authentication Required", str(error))
        return
    if refusal is not None:
        await _answer(stream, b"403 Forbidden", refusal)
        return
    try:
        with trio.fail_after(_CONNECT_TIME):
            server = await trio.open_tcp_stream(request.target.host, request.target.port)
    except ValueError as error:  # a UnicodeError, for example: IDNA refuses some names
        await _answer(
            stream, b"400 Bad Request", f"{request.target.host!r} is not a name that can be resolved: {error}"
        )
        return
    except (OSError, trio.TooSlowError) as error:
        await _answer(stream, b"502 Bad Gateway", repr(error))
        return
    async with server:
        if request.is_tunnel:
            await stream.send_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await server.send_all(rest if request.is_tunnel else request.for_the_server() + rest)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pump, stream, server, nursery.cancel_scope)
            nursery.start_soon(_pump, server, stream, nursery.cancel_scope)


async def _read_head(stream: trio.SocketStream) -> tuple[Request, bytes]:
    """Read the request's head; return the request and the bytes that came after it."""
    data = b""
    while (found := server_reader.split_head(data)) is None:
        chunk = await stream.receive_some(8192)
        if not chunk:
            raise ValueError(f"the connection ended after {len(data)} bytes of a request head")
        data += chunk
    head, rest = found
    return Request(head), rest


async def _answer(stream: trio.SocketStream, status: bytes, text: str) -> None:
    body = text.encode() + b"\n"
    wants = b'Proxy-Authenticate: Basic realm="sandbox"\r\n' if status.startswith(b"407") else b""
    head = b"HTTP/1.1 %b\r\n%bContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    await stream.send_all(head % (status, wants, len(body)) + body)


async def _pump(source: trio.SocketStream, sink: trio.SocketStream, both: trio.CancelScope) -> None:
    """Copy bytes one way until their end, and pass the end on. A broken connection ends both ways."""
    await trio.lowlevel.checkpoint()
    try:
        async for chunk in source:
            await sink.send_all(chunk)
        await sink.send_eof()
    except _GONE:
        both.cancel("the other side is gone")
