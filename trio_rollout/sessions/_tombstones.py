"""Closed sessions that are still remembered, bounded in number and in time. Time comes in as a float."""

from collections import OrderedDict
from typing import final

import attrs


@final
@attrs.define(eq=False)
class Tombstones:
    """Ids and keys of sessions that were closed lately, oldest first."""

    most: int
    seconds: float
    _keys: OrderedDict[str, tuple[str, float]] = attrs.field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._keys)

    def bury(self, session: str, key: str, now: float) -> None:
        """Remember a closed session; forget the oldest of too many."""
        self._forget(now)
        self._keys[session] = (key, now + self.seconds)
        while len(self._keys) > self.most:
            self._keys.popitem(last=False)

    def key_of(self, session: str, now: float) -> str | None:
        """The key of a session that is remembered as closed."""
        self._forget(now)
        found = self._keys.get(session)
        return None if found is None else found[0]

    def _forget(self, now: float) -> None:
        while self._keys and next(iter(self._keys.values()))[1] <= now:
            self._keys.popitem(last=False)
