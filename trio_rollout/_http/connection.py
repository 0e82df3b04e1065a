"""A server's address, a connection as the hot path sees it (a port of five calls), and the errors of an exchange.

Production puts sockets behind the port, a simulation puts memory there. Doing and waiting are kept apart: the two ``*_now``
calls never wait, and only the two ``wait_*`` calls are checkpoints. A cancellation therefore arrives while no byte is in
transit through the port, and an exchange can be read on after it was cancelled.
"""

import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import attrs

from ..errors import SettingsError, SettingsTypeError


@attrs.frozen(kw_only=True)
class Address:
    """One server's address. ``url`` is the normalised form that messages and mappings use."""

    url: str
    tls: bool
    host: str
    """Name or IP address without brackets; ``localhost`` for a unix socket."""
    port: int
    unix_path: str | None
    """Path of the unix socket to connect to, in place of host and port."""
    prefix: str
    """Path in front of every route: ``""`` or ``/base``."""

    @property
    def host_header(self) -> str:
        """Value of the Host header: IPv6 in brackets, no default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.unix_path or self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def _refuse(url: str, why: str) -> SettingsError:
    return SettingsError(
        f"server URL {url!r}: {why}; allowed: http://host:port[/prefix], https://host[:port][/prefix], unix:/path/to/socket"
    )


def parse_url(url: str) -> Address:
    """Parse a server's URL.

    Raises:
      SettingsError: the URL is not ``http://``, ``https://`` or ``unix:/path``, or has a user, a query or a fragment.
    """
    if not isinstance(url, str):
        raise SettingsTypeError(f"a server's URL: got {url!r}, allowed: a string")
    try:
        parts = urllib.parse.urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise _refuse(url, str(error)) from error
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise _refuse(url, "a user, a query or a fragment has no meaning here")
    if parts.scheme == "unix":
        path = parts.path
        if parts.netloc or not path.startswith("/"):
            raise _refuse(url, "a unix socket needs an absolute path")
        return Address(url=f"unix:{path}", tls=False, host="localhost", port=80, unix_path=path, prefix="")
    if "://" not in url:
        raise _refuse(url, "it has no scheme")
    if parts.scheme not in {"http", "https"}:
        raise _refuse(url, f"its scheme is {parts.scheme!r}")
    if not parts.hostname:
        raise _refuse(url, "it has no host")
    if not (parts.netloc + parts.path).isascii() or any(char.isspace() for char in parts.netloc + parts.path):
        raise _refuse(url, "only ASCII without spaces can be sent")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/")
    return Address(
        url=f"{parts.scheme}://{parts.netloc}{prefix}",
        tls=tls,
        host=parts.hostname,
        port=port if port is not None else (443 if tls else 80),
        unix_path=None,
        prefix=prefix,
    )


class Connection(Protocol):
    """One byte stream to a server. Used by one task at a time."""

    def send_now(self, data: bytes | memoryview, /) -> int:
        """Send without waiting and return the number of bytes taken; 0 if none can be taken now.

        Raises:
          OSError: the connection is broken.
        """
        ...

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        """Receive into ``buffer`` and return the number of bytes; 0 at the end of the stream, None if there is nothing yet.

        Raises:
          OSError: the connection is broken.
        """
        ...

    def wait_readable(self) -> Awaitable[None]:
        """Wait until ``recv_into_now`` would not return None. Level-triggered: returns at once if that holds already."""
        ...

    def wait_writable(self) -> Awaitable[None]:
        """Wait until ``send_now`` would not return 0."""
        ...

    def close(self) -> None:
        """Close the connection; closing twice does nothing."""
        ...


Connector: TypeAlias = Callable[[Address], Awaitable[Connection]]
"""Opens a connection, or raises OSError. Failed or cancelled, it leaves nothing open."""


class NotConnected(Exception):
    """No connection could be opened, so no byte of the request has been sent."""

    def __init__(self, message: str, *, ours: bool = False) -> None:
        super().__init__(message)
        self.ours = ours
        """True if the reason lies on this machine (no file descriptors, ports or memory left), not with the server."""


class ConnectionBroken(Exception):
    """The connection ended before the answer was complete."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered
        """True if at least one byte of the answer had arrived."""


class BadResponse(Exception):
    """The server sent something that is not an HTTP answer, is longer than announced, or has an encoding not asked for."""
