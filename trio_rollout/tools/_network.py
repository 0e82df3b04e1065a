"""Network policies: the hosts that an exec session may reach. ``open_proxy_policy`` serves one that works everywhere.

A policy hands each session a grant: variables for the session's environment, and a denial, by which the policy ends the session
when the session asks for more. The proxy is a policy for programs that obey their environment, as package managers and HTTP
clients do. It is **no wall**: only a container or a network namespace stops a program that opens sockets itself.

The proxy speaks HTTP/1.1 on the loopback interface, one request a connection: CONNECT, for TLS, and absolute-form requests, for
plain HTTP. The bytes after the head are not read, and go to the server that was checked and to no other.
"""

import base64
import binascii
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Protocol, TypeAlias, final
from urllib.parse import urlsplit

import attrs
import trio

from .._http import server_reader
from .._util.service import open_service
from .._util.user_code import logging_failures

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
    """The head of a request to the proxy. ValueError: the request names no host that this proxy can reach."""

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


FALLBACK_MESSAGE = "Network access was denied by the sandbox network proxy."


@final
@attrs.define(eq=False, repr=False)
class NetworkGrant:
    """The network access of one exec session: its environment, and its denial, if a policy denies it.

    ``env`` is added to the environment of the session's command. ``on_finish`` is called once, when the session has ended or
    was denied: then the policy can forget the session.
    """

    env: Mapping[str, str] = attrs.field(factory=dict)
    on_finish: Callable[[], None] | None = attrs.field(default=None, kw_only=True)
    message: str | None = attrs.field(default=None, init=False)
    """The first denial's message; None if the session was not denied."""
    _event: trio.Event = attrs.field(factory=trio.Event, init=False)
    _finished: bool = attrs.field(default=False, init=False)

    @property
    def denied(self) -> bool:
        """True once the session was denied."""
        return self._event.is_set()

    def deny(self, message: str | None = None) -> None:
        """Deny the session, which kills its process. Idempotent: the first message stays."""
        if not self.denied:
            self.message = message or FALLBACK_MESSAGE
            self._event.set()

    async def wait_denied(self) -> None:
        """Wait until the session is denied."""
        await self._event.wait()

    def finish(self) -> str | None:
        """Let the policy forget the session; return the message if the session was denied. Idempotent."""
        if not self._finished:
            self._finished = True
            if self.on_finish is not None:
                with logging_failures(_log, "a network policy failed to forget a session"):
                    self.on_finish()
        return self.message


class NetworkPolicy(Protocol):
    """Decides which hosts exec sessions may reach."""

    def grant(self) -> NetworkGrant:
        """Admit one more session. The session finishes its grant when it ends."""
        ...


_LAST_PORT = 65535


def _checked(patterns: Iterable[str]) -> tuple[str, ...]:
    lowered = tuple(pattern.lower() for pattern in patterns)
    for pattern in lowered:
        name, colon, port = pattern.partition(":")
        if not name or (colon and not (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT)):
            raise ValueError(
                f"allowed hosts: {pattern!r} is neither a name nor a name with a port from 1 to {_LAST_PORT}"
            )
    return lowered


@final
@attrs.frozen
class AllowedHosts:
    """Host names that may be reached, in the forms that ``open_proxy_policy`` takes; ValueError for any other form."""

    patterns: tuple[str, ...] = attrs.field(converter=_checked)

    def allows(self, target: Target) -> bool:
        """Return True if the target's host and port are on the list. No name is resolved: an address is not a name."""
        host = target.host.lower().rstrip(".")
        return any(self._fits(pattern, host, target.port) for pattern in self.patterns)

    @staticmethod
    def _fits(pattern: str, host: str, port: int) -> bool:
        name, _, wanted_port = pattern.partition(":")
        if wanted_port and int(wanted_port) != port:
            return False
        return host.endswith(name[1:]) if name.startswith("*.") else host == name


@final
@attrs.define(eq=False, repr=False)
class ProxyPolicy:
    """A policy whose sessions reach the allowed hosts through a proxy. Made by ``open_proxy_policy``.

    Each session has its own token in its proxy URL, so that a refusal ends the session that asked and no other.
    """

    _allowed: AllowedHosts
    _port: int
    _grants: dict[str, NetworkGrant] = attrs.field(factory=dict, init=False)

    def grant(self) -> NetworkGrant:
        """Admit a session, with variables that make its programs use the proxy."""
        token = secrets.token_hex(16)
        url = f"http://session:{token}@127.0.0.1:{self._port}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
        grant = NetworkGrant(dict.fromkeys(names, url), on_finish=lambda: self._forget(token))
        self._grants[token] = grant
        return grant

    def _forget(self, token: str) -> None:
        self._grants.pop(token, None)

    def check(self, token: str | None, target: Target) -> str | None:
        """Return the reason to refuse ``target``, which denies the session, or None: a ``Check``."""
        grant = self._grants.get(token or "")
        if grant is None:
            raise PermissionError("no session has this token")
        if self._allowed.allows(target):
            return None
        message = f"Network access to {target.host}:{target.port} was denied by the sandbox network proxy."
        grant.deny(message)
        return message


@asynccontextmanager
async def open_proxy_policy(allow: Iterable[str], *, connections: int = 512) -> AsyncGenerator[NetworkPolicy]:
    """Serve a proxy on the loopback interface for the length of a block, and yield its policy.

    ``allow`` lists host names, such as ``example.org`` or, for the names below it, ``*.example.org``; each with ``:port``, or
    for any port. At most so many ``connections`` are served at once, and more are closed as they come: each may cost two
    descriptors of the host. Leaving closes every connection at once.

    Raises:
      ValueError: an entry of ``allow`` is not a host.
      OSError: no port could be bound.
    """
    allowed = AllowedHosts(allow)
    room = trio.Semaphore(connections)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    policy = ProxyPolicy(allowed, listeners[0].socket.getsockname()[1])

    async def connection(stream: trio.SocketStream) -> None:
        try:
            room.acquire_nowait()
        except trio.WouldBlock:
            await trio.aclose_forcefully(stream)
            return
        try:
            await serve_proxy_connection(stream, policy.check)
        finally:
            room.release()

    async with open_service(partial(trio.serve_listeners, connection, listeners)):
        yield policy
