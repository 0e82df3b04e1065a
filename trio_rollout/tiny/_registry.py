"""Which rids are active, and which of them have been told to stop: SGLang's memory of its callers. No I/O, no clock.

Its quirks: an abort for a rid that is not active does nothing, an active one is remembered, and a repeat for it is
swallowed; a rid stays active until the scheduler has ended it.
"""

from collections.abc import Iterable
from typing import final

import attrs
import trio

from .._util.condition import Condition
from ._call import Item
from ._refusal import invalid
from ._scheduler.request import Request


@final
@attrs.define(eq=False, repr=False)
class Bell:
    """Wakes the one task that waits for news of a call; news while it is busy is not lost."""

    _rung: bool = attrs.field(default=False, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)

    def ring(self) -> None:
        """There is news."""
        self._rung = True
        self._changed.notify()

    async def wait(self) -> None:
        """Wait for news. Cancelled, the news stays."""
        await self._changed.wait_until(lambda: self._rung)
        self._rung = False


@final
@attrs.define(eq=False, repr=False)
class ActiveRequest:
    """One active rid. ``request`` is None until it has been dispatched to the scheduler."""

    item: Item
    arrived: float
    bell: Bell
    """Rung by every token of a request that streams, and by its end; shared by the requests of one call."""
    request: Request | None = None
    abort_sent: bool = False
    ended_at: float = 0.0
    ended: trio.Event = attrs.field(factory=trio.Event)

    def __repr__(self) -> str:
        return f"<ActiveRequest {self.item.rid} {self.request or 'not dispatched'}>"


@final
@attrs.define(eq=False, repr=False)
class Registry:
    """The active rids."""

    _lives: dict[str, ActiveRequest] = attrs.field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<Registry {len(self._lives)} active>"

    def __len__(self) -> int:
        return len(self._lives)

    def register(self, items: Iterable[Item], now: float) -> list[ActiveRequest]:
        """Make the rids of ``items`` active, all of them or none.

        Raises:
          Refusal: one of them is active already.

        """
        fresh: dict[str, ActiveRequest] = {}
        bell = Bell()
        for item in items:
            if item.rid in self._lives or item.rid in fresh:
                raise invalid(f"Duplicate request ID detected: {item.rid}")
            fresh[item.rid] = ActiveRequest(item, now, bell)
        self._lives.update(fresh)
        return list(fresh.values())

    def may_abort(self, rid: str) -> bool:
        """Whether an abort for ``rid`` goes on to the scheduler; it is remembered then, and only the first one goes."""
        live = self._lives.get(rid)
        if live is None or live.abort_sent:
            return False
        live.abort_sent = True
        return True

    def forget(self, live: ActiveRequest) -> None:
        """Its rid is free, if it is still its own."""
        if self._lives.get(live.item.rid) is live:
            del self._lives[live.item.rid]

    def is_active(self, live: ActiveRequest) -> bool:
        """Whether its rid is still its own."""
        return self._lives.get(live.item.rid) is live

    def advanced(self, requests: Iterable[Request]) -> None:
        """Wake those who stream."""
        for request in requests:
            if request.wanted.stream and (live := self._lives.get(request.rid)) is not None:
                live.bell.ring()

    def settle(self, requests: Iterable[Request], now: float) -> None:
        """The scheduler has ended these: wake whoever waits, free their rids."""
        for request in requests:
            live = self._lives.pop(request.rid, None)
            if live is not None:
                live.ended_at = now
                live.ended.set()
                live.bell.ring()
