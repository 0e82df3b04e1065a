"""A connection as the hot path sees it: a port of five calls, and the errors of an exchange.

Production puts sockets behind the port, a simulation puts memory there. Doing and waiting are kept apart: the two ``*_now``
calls never wait, and only the two ``wait_*`` calls are checkpoints. A cancellation therefore arrives while no byte is in
transit through the port, and an exchange can be read on after it was cancelled.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from .address import Address


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
