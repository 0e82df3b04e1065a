"""The part between HTTP and the scheduler: registration, pause, aborts, weight updates, and the loop that steps.

Owns: the registry of active rids, the scheduler, the pause. In SGLang the HTTP side and the scheduler are two processes with a
queue between them; the quirks that come from that are copied, and the text says where.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import final

import attrs
import trio

from .._http.server import ClientGone
from .._util.condition import Condition
from .._util.read_write_lock import ReadWriteLock
from .._util.time import wait_s
from ._call import Call, Submission
from ._model.model import TinyModel
from ._registry import ActiveRequest, Registry
from ._scheduler.request import Request
from ._scheduler.scheduler import Scheduler
from ._settings import TinySettings


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
        if not self.registry.is_active(active):
            return
        if active.request is None:
            self.registry.forget(active)
        else:
            self.abort(active.item.rid)

    @property
    def is_busy(self) -> bool:
        """True if any request runs or waits, paused or not."""
        return bool(self.scheduler.running or self.scheduler.waiting)
