"""The sessions of one gateway by id: the open ones, and for a while the closed ones.

A closed session leaves a tombstone, its id and its key, so that the agent's late requests are told "session closed" and
not "no such session". Tombstones are bounded in number and in time.
"""

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import attrs
import trio

from ._session import GatewaySession


@final
@attrs.define(eq=False)
class SessionDirectory:
    """Finds sessions and their keys by id."""

    tombstones: "Tombstones"
    opened: int = attrs.field(default=0, init=False)
    """Sessions that were opened so far."""
    _open: dict[str, GatewaySession] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    def find(self, session: str) -> GatewaySession | None:
        """Return the open session with this id."""
        return self._open.get(session)

    def key_of(self, session: str) -> str | None:
        """Return the key of a session that is open or was closed lately."""
        found = self._open.get(session)
        return self.tombstones.key_of(session, trio.current_time()) if found is None else found.api_key

    @contextmanager
    def listed(self, session: GatewaySession) -> Generator[None]:
        """List a session for the length of the block, and leave a tombstone."""
        self._open[session.id] = session
        self.opened += 1
        try:
            yield
        finally:
            del self._open[session.id]
            self.tombstones.add(session.id, session.api_key, trio.current_time())


@final
@attrs.define(eq=False)
class Tombstones:
    """Ids and keys of closed sessions, oldest first: at most ``most``, each for ``seconds``. Times are passed in."""

    most: int
    seconds: float
    _keys: OrderedDict[str, tuple[str, float]] = attrs.field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, session: str, key: str, now: float) -> None:
        """Remember a closed session; drop the oldest one if there are too many."""
        self._drop_expired(now)
        self._keys[session] = (key, now + self.seconds)
        while len(self._keys) > self.most:
            self._keys.popitem(last=False)

    def key_of(self, session: str, now: float) -> str | None:
        """Return the key of a closed session that is still remembered."""
        self._drop_expired(now)
        found = self._keys.get(session)
        return None if found is None else found[0]

    def _drop_expired(self, now: float) -> None:
        while self._keys and next(iter(self._keys.values()))[1] <= now:
            self._keys.popitem(last=False)
