"""The active request ids and the aborts that were sent for them: SGLang's record of its callers. No I/O, no clock.

The quirks are SGLang's: an abort for a rid that is not active does nothing; the first abort for an active one is remembered,
and a repeat is swallowed; a rid stays active until the scheduler has ended its request.
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
class ActiveRequest:
    """An active rid and its request. ``request`` is None until it has been dispatched to the scheduler."""

    item: Item
    arrived: float
    changed: Condition
    """Notified of each token of a request that streams, and of its end; shared by the requests of one call."""
    request: Request | None = None
    abort_sent: bool = False
    ended_at: float = 0.0
    ended: trio.Event = attrs.field(factory=trio.Event)

    def __repr__(self) -> str:
        return f"<ActiveRequest {self.item.rid} {self.request or 'not dispatched'}>"


@final
@attrs.define(eq=False, repr=False)
class Registry:
    """The active requests by rid."""

    _active: dict[str, ActiveRequest] = attrs.field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<Registry {len(self._active)} active>"

    def __len__(self) -> int:
        return len(self._active)

    def register(self, items: Iterable[Item], now: float) -> list[ActiveRequest]:
        """Make the rids of ``items`` active, all of them or none, and return their requests.

        Raises:
          Refusal: one of the rids is active already.

        """
        fresh: dict[str, ActiveRequest] = {}
        changed = Condition()
        for item in items:
            if item.rid in self._active or item.rid in fresh:
                raise invalid(f"Duplicate request ID detected: {item.rid}")
            fresh[item.rid] = ActiveRequest(item, now, changed)
        self._active.update(fresh)
        return list(fresh.values())

    def may_abort(self, rid: str) -> bool:
        """Return True if an abort for ``rid`` goes on to the scheduler: only the first one for an active rid does."""
        active = self._active.get(rid)
        if active is None or active.abort_sent:
            return False
        active.abort_sent = True
        return True

    def forget(self, active: ActiveRequest) -> None:
        """Free the request's rid, unless the rid has been reassigned."""
        if self._active.get(active.item.rid) is active:
            del self._active[active.item.rid]

    def is_active(self, active: ActiveRequest) -> bool:
        """Return True if the request still has its rid."""
        return self._active.get(active.item.rid) is active

    def advanced(self, requests: Iterable[Request]) -> None:
        """Wake the calls that stream these requests."""
        for request in requests:
            if request.wanted.stream and (active := self._active.get(request.rid)) is not None:
                active.changed.notify()

    def settle(self, requests: Iterable[Request], now: float) -> None:
        """Free the rids of requests that the scheduler has ended, and wake the calls that wait for them."""
        for request in requests:
            active = self._active.pop(request.rid, None)
            if active is not None:
                active.ended_at = now
                active.ended.set()
                active.changed.notify()
