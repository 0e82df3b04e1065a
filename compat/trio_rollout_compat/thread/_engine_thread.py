"""The engine on a thread of its own, for hosts that are not Trio: synchronous, threaded, asyncio, Ray actors."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, ParamSpec, Self, TypeVar, final

import attrs

from trio_rollout._core.checks import seconds

from ..bridge._account import stack_of
from ._errors import EngineForked, EngineStuck
from ._job import Job
from ._life import Life

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")


@final
@attrs.define(eq=False, repr=False)
class EngineThread(Generic[V]):
    """Runs ``lifespan``, a function that makes an async context manager, in ``trio.run`` on a daemon thread.

    ``value`` is what the context manager yields: the engine. What it runs goes on between calls. ``grace`` seconds is how long a
    cancelled call may take to clean up, and how long the end of the interpreter waits for ``close``.

    Prefer ``open_engine_thread``. ``start`` and ``close`` are for hosts that have no block to put it around; the end of the
    interpreter closes what was not closed. Only SIGKILL, and SIGTERM without a handler (see ``exit_on_sigterm``), clean up nothing.
    """

    _lifespan: Callable[[], AbstractAsyncContextManager[V]]
    grace: float = attrs.field(default=60.0, kw_only=True, validator=seconds)
    name: str = attrs.field(default="trio-rollout engine", kw_only=True)
    _life: Life = attrs.field(init=False)
    _thread: threading.Thread = attrs.field(init=False)
    _pid: int = attrs.field(factory=os.getpid, init=False)

    def __attrs_post_init__(self) -> None:
        self._life = Life(self._lifespan)
        # A daemon: the interpreter joins other threads before it runs atexit, and would wait for this one for ever.
        self._thread = threading.Thread(target=self._life.run, name=self.name, daemon=True)

    def __repr__(self) -> str:
        state = "closed" if self._life.over.is_set() else "running" if self._life.ready.done() else "not running"
        return f"<EngineThread {self.name}: {state}>"

    @property
    def value(self) -> V:
        """What the lifespan yielded, once it is started. Its methods are for ``call``, not to be called on other threads."""
        self._refuse_after_fork("value")
        result: V = self._life.ready.result(0)
        return result

    def start(self, timeout: float | None = None) -> Self:
        """Start it and wait until the lifespan has yielded.

        Raises:
          EngineStuck: it had not after so many seconds; it goes on starting, and can be waited for again or closed.
          BaseException: whatever the lifespan raised before it yielded, as itself.

        """
        self._refuse_after_fork("start")
        if not self._life.ready.done() and self._thread.ident is None:
            atexit.register(self._close_at_exit)
            self._thread.start()
        try:
            self._life.ready.result(timeout)
        except TimeoutError as error:
            if self._life.ready.done():
                raise
            raise EngineStuck(f"start: the engine was not ready after {timeout} s; {self._whereabouts()}") from error
        return self

    def call(self, fn: Callable[..., Awaitable[T]], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> T:
        """From a thread that is not the engine's: run an async function there and return what it returns.

        Blocks the thread. After ``timeout`` seconds, or at Ctrl-C, the function is cancelled and its cleanup waited for, at most
        ``grace`` seconds. A result that came at the last moment is returned all the same.

        Raises:
          TimeoutError: it was cancelled because of the timeout.
          EngineStuck: it did not end even then.
          EngineClosed: the engine is closed or has failed; the cause is its failure.
          EngineForked: this is another process.
          RuntimeError: called on the engine's own thread, which would wait for itself.
          BaseException: whatever it raised.

        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"call({fn!r}) on the engine's own thread would wait for itself: await it")
        job = self._submit(fn, args, kwargs)
        try:
            answer: T = job.answer.result(timeout)
        except BaseException as error:
            if job.answer.done() and not isinstance(error, KeyboardInterrupt):
                raise
            self._cancel_and_wait(job)
            if not isinstance(error, TimeoutError):
                raise
            if job.answer.done() and not job.answer.cancelled():
                last_moment: T = job.answer.result()
                return last_moment  # noqa: ASYNC104  a host's thread: no Cancelled comes here
            raise TimeoutError(  # noqa: ASYNC104
                f"{job.name} was cancelled: it had not returned after {timeout} s"
            ) from None
        return answer

    def submit(
        self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> "concurrent.futures.Future[T]":
        """Have an async function run on the engine's thread; from any thread.

        Cancelling the future cancels the function.

        Raises:
          EngineClosed, EngineForked: as ``call``.

        """
        return self._submit(fn, args, kwargs).answer

    async def acall(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """From asyncio: run an async function on the engine's thread and return what it returns.

        Cancelled, the function is cancelled and its end awaited before CancelledError goes on. **A result that comes at that very
        moment is lost**: a batch then counts as delivered, and the ledger offers it again after a restart or ``restore``.

        Raises:
          EngineClosed, EngineForked: as ``call``.
          BaseException: whatever it raised.

        """
        job = self._submit(fn, args, kwargs)
        try:
            answer: T = await asyncio.shield(asyncio.wrap_future(job.answer))
        except asyncio.CancelledError:
            self._life.soon(job.scope.cancel)
            await asyncio.wait([asyncio.wrap_future(job.over)], timeout=self.grace)  # noqa: ASYNC102  asyncio, and bounded
            raise
        return answer

    def close(self, timeout: float | None = None) -> None:
        """Cancel the calls under way, leave the lifespan (the engine drains), end the thread. Closing twice does nothing more.

        Blocks until it is over, at most ``timeout`` seconds.

        Raises:
          EngineStuck: it was not over then. The thread is left to itself; the process can exit.
          RuntimeError: called on the engine's own thread, which would wait for itself.
          BaseException: the engine's failure, as itself, if no call had told it.

        """
        if os.getpid() != self._pid:
            return  # nothing of it is here
        if threading.current_thread() is self._thread:
            raise RuntimeError("close() on the engine's own thread would wait for itself")
        self._life.stop()
        if self._thread.ident is None:
            return
        if not self._life.over.wait(timeout):
            raise EngineStuck(f"close: the engine did not end within {timeout} s; {self._whereabouts()}")
        self._thread.join()
        atexit.unregister(self._close_at_exit)
        if self._life.error is not None and not self._life.told:
            self._life.told = True
            raise self._life.error

    def _submit(self, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        job = Job(fn, args, kwargs)
        self._refuse_after_fork(job.name)
        self._life.submit(job)
        return job

    def _cancel_and_wait(self, job: Job) -> None:
        self._life.soon(job.scope.cancel)
        try:
            job.over.result(self.grace)
        except TimeoutError:
            raise EngineStuck(
                f"{job.name} was cancelled and did not end within {self.grace} s; {self._whereabouts()}"
            ) from None

    def _whereabouts(self) -> str:
        return f"its thread is in {stack_of(self._thread.ident)}"

    def _refuse_after_fork(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise EngineForked(
                f"{what}: this engine runs in process {self._pid}, and this is process {os.getpid()}, forked from it; open "
                "another one here"
            )

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # nobody is left to be told
                self.close(timeout=self.grace)


@contextmanager
def open_engine_thread(
    lifespan: Callable[[], AbstractAsyncContextManager[V]], *, grace: float = 60.0, start_timeout: float | None = None
) -> Generator[EngineThread[V]]:
    """An EngineThread for the length of a block.

    Entering blocks until the lifespan has yielded. Leaving closes it and blocks until everything is cleaned up, at most ``grace``
    seconds: it should exceed ``Deadlines.drain``. The body's own exception comes out as itself.

    Raises:
      EngineStuck: it was not ready after ``start_timeout``, or not over after ``grace`` seconds.
      BaseException: what the lifespan raised, if no call had told it.

    """
    thread = EngineThread(lifespan, grace=grace)
    try:
        yield thread.start(start_timeout)
    except BaseException:
        with contextlib.suppress(Exception):  # the body's own error says more
            thread.close(grace)
        raise
    thread.close(grace)
