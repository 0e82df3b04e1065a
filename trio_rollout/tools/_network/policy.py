"""Denials: a policy that watches a session from outside, such as a network proxy, says no. The first message counts.

Network policies: what a session may reach. One that works everywhere: a proxy with a list of allowed hosts.

The hook is the grant: variables for the command's environment, and a handle through which the policy ends the session when
it asks for more. The proxy is a policy for programs that keep to their environment, as package managers and HTTP
clients do. It is **no wall**: a program that opens sockets itself is stopped by a container or a network namespace only.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, final

import attrs
import trio

from ..._util.service import open_service
from .proxy import Target, serve_proxy_connection

_log = logging.getLogger("trio_rollout.tools")

FALLBACK_MESSAGE = "Network access was denied by the sandbox network proxy."


@final
@attrs.define(eq=False, repr=False)
class DenialHandle:
    """The denial of one session, if it comes. Held by the session and by whoever may deny it.

    ``on_finish`` is called once, when the session is over or was denied: the policy can forget the session then.
    """

    fallback: str = FALLBACK_MESSAGE
    on_finish: Callable[[], None] | None = attrs.field(default=None, kw_only=True)
    message: str | None = attrs.field(default=None, init=False)
    _event: trio.Event = attrs.field(factory=trio.Event, init=False)
    _finished: bool = attrs.field(default=False, init=False)

    @property
    def denied(self) -> bool:
        """Whether it was denied."""
        return self._event.is_set()

    def deny(self, message: str | None = None) -> None:
        """Deny the session. Idempotent: the first message stays."""
        if not self.denied:
            self.message = message or self.fallback
            self._event.set()

    async def wait(self) -> None:
        """Wait until it is denied."""
        await self._event.wait()

    def finish(self) -> str | None:
        """The session is over: the message if it was denied. Repeated, it changes nothing."""
        if not self._finished:
            self._finished = True
            if self.on_finish is not None:
                try:
                    self.on_finish()
                except Exception:  # ruff: ignore[blind-except]  a policy's error must not change how a session ended
                    _log.exception("a network policy failed to forget a session")
        return self.message


@attrs.frozen(kw_only=True)
class NetworkGrant:
    """What one session gets of a policy: its environment, and the handle that may end it."""

    env: Mapping[str, str]
    denial: DenialHandle


class NetworkPolicy(Protocol):
    """Decides what sessions may reach."""

    def grant(self) -> NetworkGrant:
        """Admit one more session. It is forgotten when the session finishes its denial handle."""
        ...


_LAST_PORT = 65535


def _checked(patterns: Iterable[str]) -> tuple[str, ...]:
    lowered = tuple(pattern.lower() for pattern in patterns)
    for pattern in lowered:
        name, colon, port = pattern.partition(":")
        if not name or (colon and not (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT)):
            raise ValueError(f"allowed hosts: {pattern!r} is no name, nor a name with a port from 1 to {_LAST_PORT}")
    return lowered


@final
@attrs.frozen
class AllowedHosts:
    """Host names that may be reached: ``example.org``, ``*.example.org`` (what is below it), each with ``:port`` or any.

    Raises:
      ValueError: one of them is none of these.

    """

    patterns: tuple[str, ...] = attrs.field(converter=_checked)

    def allows(self, target: Target) -> bool:
        """Whether this host and port are on the list. Nothing is looked up: an address is not a name."""
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
    """Sessions may reach what the list allows, through a proxy of ours. Made by ``open_proxy_policy``.

    Each session has a token of its own in its proxy URL, so that a refusal ends the session that asked and no other.
    """

    _allowed: AllowedHosts
    _port: int
    _grants: dict[str, DenialHandle] = attrs.field(factory=dict, init=False)

    def grant(self) -> NetworkGrant:
        """Admit a session: variables that make its programs use the proxy."""
        token = secrets.token_hex(16)
        denial = DenialHandle(on_finish=lambda: self._forget(token))
        self._grants[token] = denial
        url = f"http://session:{token}@127.0.0.1:{self._port}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
        return NetworkGrant(env=dict.fromkeys(names, url), denial=denial)

    @property
    def open_grants(self) -> int:
        """Sessions that have not finished."""
        return len(self._grants)

    def _forget(self, token: str) -> None:
        self._grants.pop(token, None)

    def check(self, token: str | None, target: Target) -> str | None:
        """Why this session may not reach ``target``; None: it may. The refusal is its denial.

        Raises:
          PermissionError: no session has this token.

        """
        denial = self._grants.get(token or "")
        if denial is None:
            raise PermissionError("no session has this token")
        if self._allowed.allows(target):
            return None
        message = f"Network access to {target.host}:{target.port} was denied by the sandbox network proxy."
        denial.deny(message)
        return message


@asynccontextmanager
async def open_proxy_policy(allow: Iterable[str], *, connections: int = 512) -> AsyncGenerator[ProxyPolicy]:
    """Serve a proxy on the loopback interface for the length of a block.

    ``allow`` lists hosts as ``AllowedHosts`` says. Beyond so many ``connections`` at once, more are closed as they come:
    each may cost two descriptors of the host. Leaving closes every connection at once.

    Raises:
      ValueError: ``allow`` has something that is no host.
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
