"""The connections to one server: idle ones are reused, last in, first out, in O(1).

There is no limit on the connections in use and no queue: the engine's slots bound them. The connection used last is taken
first, so that the surplus of a burst ages at the other end, where it is closed.
"""

import errno
from collections import deque
from typing import Final, final

import trio

from .address import Address
from .connection import Connection, Connector, NotConnected
from .exchange import Exchange
from .reader import SCRATCH_SIZE

# Errors of connect() that are this machine's.
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


@final
class Pool:
    """The connections to one server. ``connections`` counts the open ones, idle or in use."""

    def __init__(self, address: Address, connect: Connector, *, max_idle: int, idle_s: float, connect_s: float) -> None:
        self.address = address
        self.connections = 0
        self._connect = connect
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._connect_s = connect_s
        self._idle: deque[tuple[Connection, float]] = deque()
        self._scratch = memoryview(bytearray(SCRATCH_SIZE))
        self._closed = False

    def __repr__(self) -> str:
        return f"<Pool {self.address.url}: {self.connections} open, {len(self._idle)} idle>"

    async def take(self, *, fresh: bool = False) -> Exchange:
        """Return a connection for one exchange: an idle one if any is alive, else (or with ``fresh``) a new one.

        Blocks only for a new connection, at most ``connect_s``. Cancelled, nothing stays open.

        Raises:
          NotConnected: no connection could be opened.

        """
        idle = None if fresh else self.take_idle()
        return idle if idle is not None else await self.open()

    def take_idle(self) -> Exchange | None:
        """Return an idle connection for one exchange, or None if none is alive."""
        if not self._idle:
            return None
        oldest = trio.current_time() - self._idle_s
        while self._idle:
            connection, since = self._idle.pop()
            # The server is about to close one that is too old; a new one avoids that race.
            if since >= oldest and self._alive(connection):
                return Exchange(self, connection, self._scratch, reused=True)
            self._drop(connection)
        return None

    async def open(self) -> Exchange:
        """Return a new connection for one exchange; blocks and raises as ``take`` does."""
        if self._closed:
            raise RuntimeError(f"the connections to {self.address.url} are closed: open_sglang_servers has been left")
        return Exchange(self, await self._open(), self._scratch, reused=False)

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        """Take back a connection from an exchange that has ended; close it unless ``reusable``."""
        if not reusable or self._closed:
            self._drop(connection)
            return
        now = trio.current_time()
        self._idle.append((connection, now))
        while self._idle and (len(self._idle) > self._max_idle or self._idle[0][1] + self._idle_s < now):
            self._drop(self._idle.popleft()[0])

    def close(self) -> None:
        """Close the idle connections now, and the others when they are given back."""
        self._closed = True
        while self._idle:
            self._drop(self._idle.pop()[0])

    def _drop(self, connection: Connection) -> None:
        self.connections -= 1
        connection.close()

    def _alive(self, connection: Connection) -> bool:
        """Return True if an idle connection has nothing to read: data, or its end, makes it useless."""
        try:
            return connection.recv_into_now(self._scratch) is None
        except OSError:
            return False

    async def _open(self) -> Connection:
        url = self.address.url
        try:
            with trio.move_on_after(self._connect_s):
                connection = await self._connect(self.address)
                self.connections += 1
                return connection
        except OSError as error:
            raise NotConnected(f"cannot connect to {url}: {error}", ours=error.errno in _OURS) from error
        raise NotConnected(f"cannot connect to {url}: no answer within {self._connect_s:g} s")
