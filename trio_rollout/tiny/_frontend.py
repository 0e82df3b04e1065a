"""The part between HTTP and the scheduler: registration, pause, aborts, weight updates, and the loop that steps.

Owns: the registry of active rids, the scheduler, the pause. In SGLang the HTTP side and the scheduler are two processes with a
queue between them; the quirks that come from that are copied, and the text says where.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import final

import attrs
import trio

from .._http.server import ClientGone
from .._util.condition import Condition
from .._util.read_write_lock import ReadWriteLock
from .._util.time import wait_s
from ._body import invalid
from ._call import Call, Item, Submission
from ._model.model import TinyModel
from ._scheduler.request import Request
from ._scheduler.scheduler import Scheduler
from ._settings import TinySettings


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
    """The active requests by rid, and the aborts that were sent for them: SGLang's record of its callers. No I/O, no clock.

    The quirks are SGLang's: an abort for a rid that is not active does nothing; the first abort for an active one is
    remembered, and a repeat is swallowed; a rid stays active until the scheduler has ended its request.
    """

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


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Frontend:
    """The server without HTTP."""

    settings: TinySettings
    scheduler: Scheduler
    submission: Submission
    registry: Registry = attrs.field(factory=Registry, init=False)
    lock: ReadWriteLock = attrs.field(factory=ReadWriteLock, init=False)
    paused: bool = attrs.field(default=False, init=False)
    step_delay: float = attrs.field(init=False)
    steps: int = attrs.field(default=0, init=False)
    """Number of steps so far: a sign of life."""
    _pausing: trio.Condition = attrs.field(factory=trio.Condition, init=False)
    _work: Condition = attrs.field(factory=Condition, init=False)
    _idle: Condition = attrs.field(factory=Condition, init=False)
    _flushing: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.step_delay = self.settings.step_delay

    def __repr__(self) -> str:
        return f"<Frontend {self.registry!r} {self.scheduler!r}>"

    async def run(self) -> None:
        """Step while there is work. Runs until cancelled.

        Raises:
          OutOfVocabulary: a prompt holds an id that the model does not have; a real server dies of that.
        """
        while True:
            if not self.scheduler.has_work:
                await self._work.wait_until(lambda: self.scheduler.has_work)
            step = self.scheduler.step()
            self.steps += 1
            self.registry.settle(step.ended, trio.current_time())
            self.registry.advanced(step.advanced)
            if self.scheduler.idle:
                self._idle.notify()
            if self.step_delay:
                await wait_s(self.step_delay)
            else:
                await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def admitted(self, call: Call) -> AsyncGenerator[list[ActiveRequest]]:
        """Register the call's rids, wait while paused, dispatch the requests, and yield one for each answer.

        Entering blocks while the server is paused or a weight update waits. Leaving before a request has ended aborts it,
        or forgets it if it has not been dispatched.

        Raises:
          Refusal: a rid is already active, or a request cannot be served.
        """
        owned = self.registry.register(call.items, trio.current_time())
        try:
            await self._wait_open()
            async with self.lock.reading():
                all_active = owned
                if call.samples > 1:
                    all_active = await self._sample_often(call, owned)
                for active in all_active:
                    self._dispatch(active)
                yield all_active
        finally:
            for active in owned:
                self._release(active)

    async def finished(self, active: ActiveRequest, gone: trio.Event) -> Request:
        """Wait until a request has ended; every ``disconnect_poll`` seconds check that its client is connected, as SGLang does.

        Raises:
          ClientGone: the client has left; the request has been aborted.
        """
        while not active.ended.is_set():
            with trio.move_on_after(self.settings.disconnect_poll):
                await active.ended.wait()
            if not active.ended.is_set() and gone.is_set():
                self.abort(active.item.rid)
                raise ClientGone(active.item.rid)
        if active.request is None:
            raise AssertionError(f"{active!r} ended without a request")
        return active.request

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort by rid. As in SGLang, lost for a request that is registered and not dispatched; a repeat is swallowed."""
        if not everything and not (rid and self.registry.may_abort(rid)):
            return
        self.registry.settle(self.scheduler.abort(None if everything else rid), trio.current_time())
        if self.scheduler.idle:
            self._idle.notify()

    async def pause(self, *, mode: str) -> None:
        """Pause. In mode "abort" return once nothing is in flight, checking every ``abort_poll`` seconds."""
        async with self._pausing:
            self.paused = True
            if mode != "abort":
                self.registry.settle(self.scheduler.pause(retract=mode == "retract"), trio.current_time())
                return
            while True:
                self.abort(everything=True)
                if not self.lock.held:
                    return
                await wait_s(self.settings.abort_poll)

    async def resume(self) -> None:
        """Resume, and dispatch the parked requests."""
        async with self._pausing:
            self.paused = False
            self.scheduler.resume()
            self._work.notify()
            self._pausing.notify_all()

    async def flush(self, patience: float) -> str | None:
        """Flush the prefix cache, waiting up to ``patience`` seconds for an idle server. Return an error message, or None."""
        if self._flushing:
            return "Another flush_cache is already in progress."
        self._flushing = True
        try:
            with trio.move_on_after(patience):
                if patience:
                    await self._idle.wait_until(lambda: self.scheduler.idle)
        finally:
            self._flushing = False
        if self.scheduler.flush():
            return None
        return "Timed out waiting for idle state." if patience else "Flush cache failed.\n"

    async def update_weights(self, model: TinyModel, version: str | None, *, flush: bool) -> bool:
        """Take other weights: at once when paused, otherwise when nothing is in flight. Return False if the cache was not flushed."""
        async with self._pausing:
            paused = self.paused
        if paused:
            return self._take(model, version, flush=flush)
        async with self.lock.writing():
            return self._take(model, version, flush=flush)

    def _take(self, model: TinyModel, version: str | None, *, flush: bool) -> bool:
        self.scheduler.set_model(model)
        if version is not None:
            self.scheduler.set_version(version)
        return self.scheduler.flush() if flush else True

    async def _wait_open(self) -> None:
        """Wait silently while paused, as SGLang parks requests. The lock is not taken when there is no pause."""
        if not self.paused:
            return
        async with self._pausing:
            while self.paused:
                await self._pausing.wait()

    async def _sample_often(self, call: Call, owned: list[ActiveRequest]) -> list[ActiveRequest]:
        """Serve ``n`` > 1: run each prompt once for the cache, then drop the caller's rids and register new ones."""
        warmups, samples = self.submission.multiplied(call)
        for item in warmups:
            warmup = self.registry.register([item], trio.current_time())
            owned.extend(warmup)
            self._dispatch(warmup[0])
            await warmup[0].ended.wait()
        for active in owned:
            self.registry.forget(active)
        fresh = self.registry.register(samples, trio.current_time())
        owned.extend(fresh)
        return fresh

    def _dispatch(self, active: ActiveRequest) -> None:
        active.request = self.submission.request(active.item, self.scheduler.model.vocab)
        if not self.scheduler.add(active.request):
            self.registry.settle([active.request], trio.current_time())
        self._work.notify()

    def _release(self, active: ActiveRequest) -> None:
        if active.request is None:
            self.registry.forget(active)
        elif self.registry.is_active(active):
            self.abort(active.item.rid)
