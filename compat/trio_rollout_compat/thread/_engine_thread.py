"""What only an engine on another thread can go through. A closed or crashed one raises ``trio_rollout.errors.EngineClosed``.

What is to happen at the end of the interpreter, before it waits for threads.

SIGTERM as an orderly exit, for hosts that want one.

The engine on a thread of its own, for hosts that are not Trio: synchronous, threaded, asyncio, Ray actors.
"""

import asyncio
import atexit
import concurrent.futures
import os
import signal
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType
from typing import Any, Generic, ParamSpec, Self, TypeVar, final

import attrs

from trio_rollout.errors import EngineClosed, RolloutError
from trio_rollout.lowlevel import seconds

from ..bridge._account import stack_of
from ._life import Job, Life


class EngineForked(RolloutError):
    """The engine belongs to the parent process: threads do not survive a fork. Open one of its own in the child."""


class EngineStuck(RolloutError, TimeoutError):
    """The engine's thread did not answer in time: something on it blocks. The message shows where."""


def call_at_exit(method: Callable[[], None]) -> None:
    """Have a bound method called at the end of the interpreter, unless its object is gone by then.

    The interpreter joins the program's threads before it runs ``atexit``, and one that waits for the engine would wait for
    ever. So it is done where ``concurrent.futures`` ends its workers, by the same private hook (checked with Python 3.11 to 3.13).
    Nothing can be taken out of it again, hence the weak reference.
    """
    weak: weakref.WeakMethod[Callable[[], None]] = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := weak()) is not None:
            alive()

    register: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(call)
    except RuntimeError:  # the main thread is over already, and threads are being joined
        atexit.register(call)


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """Inside the block SIGTERM raises SystemExit(143) in the main thread, so that blocks are left and atexit runs.

    The default action ends the process at once, with nothing cleaned up; that is what container runtimes and ``ray stop`` send
    first. For the main thread only, like every signal handler. Leaving puts the handler back that was there before; one that C
    code had installed can't be put back by Python, and the default action takes its place.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")


@final
@attrs.define(eq=False, repr=False)
class EngineThread(Generic[V]):
    """Runs ``lifespan``, a function that makes an async context manager, in ``trio.run`` on a daemon thread.

    ``value`` is what the context manager yields: the engine. What it runs goes on between calls. ``grace`` seconds is how long a
    cancelled call may take to clean up, and how long the end of the interpreter waits for ``close``.

    Prefer ``open_engine_thread``, in asyncio ``aopen_engine_thread``. ``start`` and ``close`` are for hosts that have no block to put
    it around; the end of the interpreter (of its main thread) closes what was not closed. Only SIGKILL, and SIGTERM without a
    handler (see ``exit_on_sigterm``), clean up nothing. It runs once: closed, it can't be started again.
    """

    _lifespan: Callable[[], AbstractAsyncContextManager[V]]
    grace: float = attrs.field(default=60.0, kw_only=True, validator=seconds)
    name: str = attrs.field(default="trio-rollout engine", kw_only=True)
    _life: Life = attrs.field(init=False)
    _thread: threading.Thread = attrs.field(init=False)
    _pid: int = attrs.field(factory=os.getpid, init=False)
    _starting: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _started: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._life = Life(self._lifespan)
        # A daemon, because a wedged one must not keep the process; its target, so that it lives as long as the thread.
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def _run(self) -> None:
        self._life.run()

    def __repr__(self) -> str:
        state = "closed" if self._life.over.done() else "running" if self._life.ready.done() else "not running"
        return f"<EngineThread {self.name}: {state}>"

    @property
    def value(self) -> V:
        """What the lifespan yielded, once it is started. Its methods are for ``call``, not to be called on other threads.

        Raises:
          EngineClosed: it is not started.
          BaseException: whatever the lifespan raised before it yielded, as itself.

        """
        self._refuse_after_fork("value")
        if not self._life.ready.done():
            raise EngineClosed("value: the engine is not started")
        result: V = self._life.ready.result(0)
        return result

    def start(self, timeout: float | None = None) -> Self:
        """Start it and wait until the lifespan has yielded. From several threads: it starts once, and all of them wait.

        Raises:
          EngineStuck: it had not after so many seconds; it goes on starting, and can be waited for again or closed.
          EngineClosed: it is closed or has failed.
          EngineForked: this is another process.
          BaseException: whatever the lifespan raised before it yielded, as itself.

        """
        self._begin()
        concurrent.futures.wait([self._life.ready], timeout)
        return self._begun(timeout)

    async def astart(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109  a promise about blocking
        """``start`` for asyncio, which goes on meanwhile. Cancelled, it goes on starting, and must be closed.

        Raises:
          EngineStuck, EngineClosed, EngineForked, BaseException: as ``start``.

        """
        self._begin()
        ready = asyncio.wrap_future(self._life.ready)
        ready.add_done_callback(_looked_at)
        await asyncio.wait([ready], timeout=timeout)
        return self._begun(timeout)

    def _begin(self) -> None:
        self._refuse_after_fork("start")
        with self._starting:
            if self._life.over.done() or (self._life.stopping and not self._started):
                raise self._life.closed("start")
            if not self._started:
                call_at_exit(self._close_at_exit)
                self._started = (
                    True  # before it is: a signal's exception may come out of ``start`` when the thread runs already
                )
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can be started
                    self._started = False
                    raise

    def _begun(self, timeout: float | None) -> Self:
        if not self._life.ready.done():
            raise EngineStuck(f"start: the engine was not ready after {timeout} s; {self._whereabouts()}")
        self._life.ready.result()
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
            concurrent.futures.wait([job.answer], timeout)
        except BaseException:  # Ctrl-C, or what a signal handler raises
            self._cancel_and_wait(job)
            raise
        if not job.answer.done():
            self._cancel_and_wait(job)
            if job.answer.cancelled() or not job.answer.done():
                raise TimeoutError(f"{job.name} was cancelled: it had not returned after {timeout} s")
        answer: T = job.answer.result()
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
        if self._stop():
            concurrent.futures.wait([self._life.over], timeout)
            self._stopped(timeout)

    async def aclose(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  a promise about blocking
        """``close`` for asyncio, which goes on meanwhile. Cancelled, it goes on closing.

        Raises:
          EngineStuck, RuntimeError, BaseException: as ``close``.

        """
        if self._stop():
            await asyncio.wait([asyncio.wrap_future(self._life.over)], timeout=timeout)
            self._stopped(timeout)

    def _stop(self) -> bool:
        """Whether there is an end to wait for."""
        if os.getpid() != self._pid:
            return False  # nothing of it is here
        if threading.current_thread() is self._thread:
            raise RuntimeError("close() on the engine's own thread would wait for itself")
        self._life.stop()
        with self._starting:
            return self._started

    def _stopped(self, timeout: float | None) -> None:
        if not self._life.over.done():
            raise EngineStuck(f"close: the engine did not end within {timeout} s; {self._whereabouts()}")
        self._thread.join()
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
        if os.getpid() != self._pid:
            return
        self._life.told = True  # nobody is left to be told of its failure
        try:
            self.close(timeout=self.grace)
        except EngineStuck as error:
            self._life.abandon(error)


def _looked_at(future: "asyncio.Future[Any]") -> None:
    """Or asyncio complains of a failed start that nobody waits for any more."""
    if not future.cancelled():
        future.exception()
