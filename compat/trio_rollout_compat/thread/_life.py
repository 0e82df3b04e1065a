"""One call into the engine's thread, seen from both sides.

What runs on the engine's thread: the lifespan, and the calls inside of it.
"""

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, final

import attrs
import trio

from trio_rollout.errors import EngineClosed
from trio_rollout.lowlevel import open_service_nursery

from ..bridge._call import name_of
from ..bridge._errors import apart, described, portable

_log: Final = logging.getLogger("trio_rollout.compat")


@final
@attrs.frozen(eq=False, repr=False)
class Job:
    """``answer`` is what the host waits for; ``over`` is set when nothing of it runs any more."""

    fn: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: "concurrent.futures.Future[Any]" = attrs.field(factory=concurrent.futures.Future)
    over: "concurrent.futures.Future[None]" = attrs.field(factory=concurrent.futures.Future)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def name(self) -> str:
        """What was called."""
        return name_of(self.fn)

    async def run(self) -> None:  # noqa: ASYNC910  whether there is a checkpoint is the function's affair
        """Run it on the engine's thread. What it raises is the caller's, whatever its class: the engine goes on.

        Cancelled from outside, the answer stays open: only the end of the run knows why.
        """
        try:
            with self.scope:
                value = await self.fn(*self.args, **self.kwargs)
                self.settle(value)
            if self.scope.cancelled_caught:
                self.answer.cancel()
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  a real cancellation goes on below
            own, cancellation = apart(error)
            if own is not None:
                self.settle(error=portable(own, self.name))
            if cancellation is not None:
                raise cancellation from None  # noqa: ASYNC104  the very same
        self.finish()

    def settle(self, value: Any = None, *, error: BaseException | None = None) -> None:
        """Give the answer, unless the host has given it up."""
        try:
            if error is None:
                self.answer.set_result(value)
            else:
                self.answer.set_exception(error)
        except concurrent.futures.InvalidStateError:
            pass
        except BaseException as raised:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no cancellation comes here
            _log.error("a callback on the answer of %s raised %s", self.name, described(raised))  # noqa: ASYNC104

    def finish(self) -> None:
        """Nothing of it runs any more, or nobody waits for that any more."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.over.set_result(None)


Lifespan = Callable[[], AbstractAsyncContextManager[Any]]


@final
@attrs.define(eq=False)
class Life:
    """One Trio run. ``ready`` gets what the lifespan yields, or what it raised before; ``over`` is done at the very end.

    Everything with a lock is called from any thread, the rest on the engine's.
    """

    _lifespan: Lifespan
    ready: "concurrent.futures.Future[Any]" = attrs.field(factory=concurrent.futures.Future, init=False)
    over: "concurrent.futures.Future[None]" = attrs.field(factory=concurrent.futures.Future, init=False)
    error: BaseException | None = attrs.field(default=None, init=False)
    told: bool = attrs.field(default=False, init=False)
    """Somebody was given ``error``."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _jobs: dict[Job, None] = attrs.field(factory=dict, init=False)
    _token: trio.lowlevel.TrioToken | None = attrs.field(default=None, init=False)
    stopping: bool = attrs.field(default=False, init=False)
    """No call is let in any more."""
    _stop: trio.Event = attrs.field(factory=trio.Event, init=False)
    _starting: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)

    def run(self) -> None:
        """The thread's function."""
        error: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as raised:  # noqa: ASYNC103  # ruff: ignore[blind-except]  the end of the thread: whoever waits is told
            error = raised
        with self._lock:
            self.stopping = True
            self.error = error
            left = list(self._jobs)
        for job in left:
            self.told = self.told or error is not None
            job.settle(error=self.closed(job.name))
            job.finish()
        if not self.ready.done():
            self.told = True
            self.ready.set_exception(error or EngineClosed("start: the engine was closed before it was ready"))
        self.over.set_result(None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._starting:
            if self.stopping:
                self._starting.cancel()
            async with self._lifespan() as value, open_service_nursery() as nursery:
                self._nursery = nursery
                self.ready.set_result(value)
                try:
                    await self._stop.wait()
                finally:
                    self._nursery = None  # or new calls could keep it busy for ever

    def closed(self, what: str) -> EngineClosed:
        """Why a call can't be made or finished; its cause is the engine's own failure, if there was one."""
        failed = f": it failed with {described(self.error)}" if self.error is not None else ""
        refusal = EngineClosed(f"{what}: the engine is closed{failed}")
        refusal.__cause__ = self.error
        return refusal

    def submit(self, job: Job) -> None:
        """Have the job run.

        Raises:
          EngineClosed: it is closed, or about to be.

        """
        with self._lock:
            if self.stopping:
                self.told = self.told or self.error is not None
                raise self.closed(job.name)
            if not self.ready.done():
                raise EngineClosed(f"{job.name}: the engine is not started")
            self._jobs[job] = None
            job.over.add_done_callback(lambda _: self._jobs.pop(job, None))
            # A host that gives the answer up gives up the work.
            job.answer.add_done_callback(lambda answer: self._give_up(job) if answer.cancelled() else None)
            self.soon(lambda: self._start(job))

    def _give_up(self, job: Job) -> None:
        self.soon(job.scope.cancel)

    def _start(self, job: Job) -> None:
        # Without a nursery the run is about to end, and its end settles the job: it knows the cause.
        if self._nursery is not None:
            self._nursery.start_soon(job.run, name=f"call {job.name}")

    def abandon(self, error: BaseException) -> None:
        """Nobody waits for it any more: whoever waits for a call gets this error."""
        with self._lock:
            left = list(self._jobs)
        for job in left:
            job.settle(error=error)
            job.finish()

    def soon(self, fn: Callable[[], object]) -> None:
        """Run a function on the engine's thread, unless its run is over."""
        try:
            if self._token is not None:
                self._token.run_sync_soon(fn)
        except trio.RunFinishedError:
            pass

    def stop(self) -> None:
        """Let no call in any more, cancel those under way, leave the lifespan."""
        with self._lock:
            self.stopping = True
        self.soon(self._stop_now)

    def _stop_now(self) -> None:
        self._stop.set()
        if not self.ready.done():
            self._starting.cancel()  # nobody will use what it is about to open
