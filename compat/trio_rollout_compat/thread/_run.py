"""The Trio run on the engine's thread, and the calls that hosts make into it.

A ``Job`` is one call: the host waits for its two futures, the engine's thread runs its function. ``EngineRun`` opens the
lifespan, runs jobs in a nursery inside of it, and leaves it when it is told to. Hosts post to the engine's thread with
Trio's token; the engine answers through the futures. The set of jobs and the end of the run are guarded by one lock.

Decision: docs/decisions/0019-whose-fault-an-exception-is.md (an exception of a job is its caller's, whatever its class).
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

Lifespan = Callable[[], AbstractAsyncContextManager[Any]]


@final
@attrs.frozen(eq=False, repr=False)
class Job:
    """On both threads: one call. The host waits for ``answer``; ``over`` is set when nothing of it runs any more."""

    fn: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: "concurrent.futures.Future[Any]" = attrs.field(factory=concurrent.futures.Future)
    over: "concurrent.futures.Future[None]" = attrs.field(factory=concurrent.futures.Future)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def name(self) -> str:
        """The function's name."""
        return name_of(self.fn)

    async def run(self) -> None:
        """On the engine's thread: run the function. An exception is the caller's, whatever its class: the engine goes on.

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
        """On any thread: give the answer, unless the host has cancelled the future."""
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
        """On any thread: say that nothing of the job runs any more, or that its end is no longer waited for."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.over.set_result(None)


@final
@attrs.define(eq=False)
class EngineRun:
    """On any thread, except for the methods that say otherwise: one Trio run with a lifespan and the jobs inside of it.

    ``ready`` gets the value that the lifespan yields, or the exception that it raised before; ``over`` is done at the very
    end. ``error`` is the engine's own failure, once the run is over.
    """

    _lifespan: Lifespan
    ready: "concurrent.futures.Future[Any]" = attrs.field(factory=concurrent.futures.Future, init=False)
    over: "concurrent.futures.Future[None]" = attrs.field(factory=concurrent.futures.Future, init=False)
    error: BaseException | None = attrs.field(default=None, init=False)
    error_was_raised: bool = attrs.field(default=False, init=False)
    """``error`` has been raised to a caller."""
    stopping: bool = attrs.field(default=False, init=False)
    """No job is accepted any more."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _jobs: dict[Job, None] = attrs.field(factory=dict, init=False)
    _token: trio.lowlevel.TrioToken | None = attrs.field(default=None, init=False)
    _stop: trio.Event = attrs.field(factory=trio.Event, init=False)
    _starting: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)

    def run(self) -> None:
        """On the engine's thread, as its function: run to the end, then settle every job that is left."""
        error: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as raised:  # noqa: ASYNC103  # ruff: ignore[blind-except]  the thread ends: its callers are told
            error = raised
        with self._lock:
            self.stopping = True
            self.error = error
            left = list(self._jobs)
        for job in left:
            self.error_was_raised = self.error_was_raised or error is not None
            job.settle(error=self.closed(job.name))
            job.finish()
        if not self.ready.done():
            self.error_was_raised = True
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
                    self._nursery = None  # or new jobs could keep it busy for ever

    def closed(self, what: str) -> EngineClosed:
        """Return the reason why a call cannot be made or finished; its cause is the engine's own failure, if it has one."""
        failed = f": it failed with {described(self.error)}" if self.error is not None else ""
        refusal = EngineClosed(f"{what}: the engine is closed{failed}")
        refusal.__cause__ = self.error
        return refusal

    def submit(self, job: Job) -> None:
        """Have the job run on the engine's thread.

        Raises:
          EngineClosed: the run is over or about to be, or has not started.
        """
        with self._lock:
            if self.stopping:
                self.error_was_raised = self.error_was_raised or self.error is not None
                raise self.closed(job.name)
            if not self.ready.done():
                raise EngineClosed(f"{job.name}: the engine is not started")
            self._jobs[job] = None
            job.over.add_done_callback(lambda _: self._jobs.pop(job, None))
            # A host that cancels the future cancels the function.
            job.answer.add_done_callback(lambda answer: self.cancel(job) if answer.cancelled() else None)
            self._post(lambda: self._start(job))

    def cancel(self, job: Job) -> None:
        """Cancel the job's function."""
        self._post(job.scope.cancel)

    def _start(self, job: Job) -> None:
        """On the engine's thread."""
        # Without a nursery the run is about to end, and its end settles the job: it knows the cause.
        if self._nursery is not None:
            self._nursery.start_soon(job.run, name=f"call {job.name}")

    def abandon(self, error: BaseException) -> None:
        """Settle every job with this error: the run is no longer waited for."""
        with self._lock:
            left = list(self._jobs)
        for job in left:
            job.settle(error=error)
            job.finish()

    def stop(self) -> None:
        """Accept no more jobs, cancel those that run, leave the lifespan."""
        with self._lock:
            self.stopping = True
        self._post(self._stop_now)

    def _stop_now(self) -> None:
        """On the engine's thread."""
        self._stop.set()
        if not self.ready.done():
            self._starting.cancel()  # what it is about to open will not be used

    def _post(self, fn: Callable[[], object]) -> None:
        """Run a function on the engine's thread, unless its run is over."""
        try:
            if self._token is not None:
                self._token.run_sync_soon(fn)
        except trio.RunFinishedError:
            pass
