"""How the hot path sees a connection: a port of five calls, and what can go wrong with it.

Production puts sockets behind it, a simulation puts memory. Waiting and doing are apart on purpose: the two ``*_now`` calls
never wait, and only the two ``wait_*`` calls are checkpoints. So every cancellation comes while no byte is in flight between
the two sides of the port, and an exchange can be read on after it was cancelled.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from .address import Address


class Connection(Protocol):
    """One byte stream to a server. Used by one task at a time."""

    def send_now(self, data: bytes | memoryview, /) -> int:
        """Bytes taken without waiting; 0 if none can be taken now. Raises OSError if the connection is broken."""
        ...

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        """Bytes put into ``buffer``; 0 at the end of the stream, None if there is nothing yet. Raises OSError if broken."""
        ...

    def wait_readable(self) -> Awaitable[None]:
        """Wait until ``recv_into_now`` would not return None (level-triggered: at once if that is so already)."""
        ...

    def wait_writable(self) -> Awaitable[None]:
        """Wait until ``send_now`` would not return 0."""
        ...

    def close(self) -> None:
        """Close it; closing twice does nothing."""
        ...


Connector: TypeAlias = Callable[[Address], Awaitable[Connection]]
"""Opens a connection. Raises OSError if it can't; failed or cancelled, it leaves nothing open."""


class NotConnected(Exception):
    """No connection could be opened, so nothing of the request has been sent."""

    def __init__(self, message: str, *, ours: bool = False) -> None:
        super().__init__(message)
        self.ours = ours
        """The reason lies on this machine (no more file descriptors, ports or memory), not with the server."""


class ConnectionBroken(Exception):
    """The connection ended before the answer was complete."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered
        """At least one byte of the answer had come."""


class BadResponse(Exception):
    """What came is no HTTP answer, is longer than announced, or is in an encoding that was not asked for."""
