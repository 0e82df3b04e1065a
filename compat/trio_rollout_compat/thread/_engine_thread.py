"""EngineThread: the engine on its own thread, for hosts that are synchronous, threaded, asyncio, or Ray actors.

Each method says from where it may be called; all of them run on the caller's thread, and reach the engine's only through
``EngineRun``. A closed or crashed engine raises ``trio_rollout.errors.EngineClosed``.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, Generic, ParamSpec, Self, TypeVar, final

import attrs

from trio_rollout.errors import EngineClosed, RolloutError
from trio_rollout.lowlevel import seconds

from ..bridge._cancel import stack_of
from ._run import EngineRun, Job

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")


class EngineForked(RolloutError):
    """The engine belongs to the parent process: threads do not survive a fork. Open another engine in the child."""


class EngineStuck(RolloutError, TimeoutError):
    """The engine's thread did not answer in time: something on it blocks. The message shows where."""


@final
@attrs.define(eq=False, repr=False)
class EngineThread(Generic[V]):
    """On the host's threads: an engine on a daemon thread, where ``trio.run`` runs ``lifespan``.

    ``lifespan`` is a function that makes an async context manager; ``value`` is the value that this yields: the engine, which
    goes on working between calls. A cancelled call has ``grace`` seconds to clean up, and so has the engine at the end of the
    interpreter.

    Prefer ``open_engine_thread``, in asyncio ``aopen_engine_thread``. ``start`` and ``close`` are for hosts without a block to
    put around it; the end of the interpreter (of its main thread) closes an engine that is still open. Only SIGKILL, and
    SIGTERM without a handler (see ``exit_on_sigterm``), skip the cleanup. An engine thread runs once: closed, it cannot be
    started again.
    """

    _lifespan: Callable[[], AbstractAsyncContextManager[V]]
    grace: float = attrs.field(default=60.0, kw_only=True, validator=seconds)
    name: str = attrs.field(default="trio-rollout engine", kw_only=True)
    _engine_run: EngineRun = attrs.field(init=False)
    _thread: threading.Thread = attrs.field(init=False)
    _pid: int = attrs.field(factory=os.getpid, init=False)
    _starting: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _started: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._engine_run = EngineRun(self._lifespan)
        # A daemon, because a blocked thread must not keep the process. A method is its target, so that this object lives as
        # long as the thread.
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)

    def _serve(self) -> None:
        """On the engine's thread."""
        self._engine_run.run()

    def __repr__(self) -> str:
        state = (
            "closed" if self._engine_run.over.done() else "running" if self._engine_run.ready.done() else "not running"
        )
        return f"<EngineThread {self.name}: {state}>"

    @property
    def value(self) -> V:
        """The value that the lifespan yielded. From any thread; but its methods are for ``call``, on the engine's thread.

        Raises:
          EngineClosed: the engine is not started.
          EngineForked: this is another process.
          BaseException: the exception that the lifespan raised before it yielded, as itself.
        """
        self._refuse_after_fork("value")
        if not self._engine_run.ready.done():
            raise EngineClosed("value: the engine is not started")
        result: V = self._engine_run.ready.result(0)
        return result

    def start(self, timeout: float | None = None) -> Self:
        """Start the engine and wait until the lifespan has yielded. From any thread; several may call it, it starts once.

        Raises:
          EngineStuck: it was not ready after ``timeout`` seconds. It goes on starting, and can be waited for again or closed.
          EngineClosed: it is closed or has failed.
          EngineForked: this is another process.
          BaseException: the exception that the lifespan raised before it yielded, as itself.
        """
        self._begin()
        concurrent.futures.wait([self._engine_run.ready], timeout)
        return self._begun(timeout)

    async def astart(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109  a promise about blocking
        """Like ``start``, from asyncio, whose loop goes on meanwhile. Cancelled, the engine goes on starting: close it.

        Raises:
          EngineStuck, EngineClosed, EngineForked, BaseException: as ``start``.
        """
        self._begin()
        ready = asyncio.wrap_future(self._engine_run.ready)
        ready.add_done_callback(_looked_at)
        await asyncio.wait([ready], timeout=timeout)
        return self._begun(timeout)

    def _begin(self) -> None:
        self._refuse_after_fork("start")
        with self._starting:
            if self._engine_run.over.done() or (self._engine_run.stopping and not self._started):
                raise self._engine_run.closed("start")
            if not self._started:
                call_at_exit(self._close_at_exit)
                # Before it is: a signal's exception may come out of ``start`` when the thread runs already.
                self._started = True
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can be started
                    self._started = False
                    raise

    def _begun(self, timeout: float | None) -> Self:
        if not self._engine_run.ready.done():
            raise EngineStuck(f"start: the engine was not ready after {timeout} s; {self._location()}")
        self._engine_run.ready.result()
        return self

    def call(self, fn: Callable[..., Awaitable[T]], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> T:
        """Run an async function on the engine's thread and return its result. From any other thread.

        Blocks the calling thread. After ``timeout`` seconds, or at Ctrl-C, the function is cancelled and its cleanup waited
        for, at most ``grace`` seconds. A result that came at the last moment is returned all the same.

        Raises:
          TimeoutError: the function was cancelled because of the timeout.
          EngineStuck: the function did not end even then.
          EngineClosed: the engine is closed or has failed; the cause is its failure.
          EngineForked: this is another process.
          RuntimeError: called on the engine's own thread, which would wait for itself.
          BaseException: the function's exception.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"call({fn!r}) on the engine's own thread would wait for itself: await it")
        job = self._submit(fn, args, kwargs)
        try:
            concurrent.futures.wait([job.answer], timeout)
        except BaseException:  # Ctrl-C, or the exception of a signal handler
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
        """Run an async function on the engine's thread and return its future. From any thread; does not block.

        Cancelling the future cancels the function.

        Raises:
          EngineClosed, EngineForked: as ``call``.
        """
        return self._submit(fn, args, kwargs).answer

    async def acall(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an async function on the engine's thread and return its result. From asyncio, whose loop goes on meanwhile.

        Cancelled, the function is cancelled and its end awaited before CancelledError goes on, at most ``grace`` seconds. **A
        result that comes at that very moment is lost**: a batch then counts as delivered, and the ledger offers it again
        after a restart or ``restore``.

        Raises:
          EngineClosed, EngineForked: as ``call``.
          BaseException: the function's exception.
        """
        job = self._submit(fn, args, kwargs)
        try:
            answer: T = await asyncio.shield(asyncio.wrap_future(job.answer))
        except asyncio.CancelledError:
            self._engine_run.cancel(job)
            await asyncio.wait([asyncio.wrap_future(job.over)], timeout=self.grace)  # noqa: ASYNC102  asyncio, and bounded
            raise
        return answer

    def close(self, timeout: float | None = None) -> None:
        """Cancel the calls under way, leave the lifespan (the engine drains), end the thread. From any other thread.

        Blocks until the thread has ended, at most ``timeout`` seconds. Closing twice has no further effect.

        Raises:
          EngineStuck: the thread has not ended in time. It goes on; the process can exit.
          RuntimeError: called on the engine's own thread, which would wait for itself.
          BaseException: the engine's failure, as itself, if it was not raised to a caller before.
        """
        if self._stop():
            concurrent.futures.wait([self._engine_run.over], timeout)
            self._stopped(timeout)

    async def aclose(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  a promise about blocking
        """Like ``close``, from asyncio, whose loop goes on meanwhile. Cancelled, the engine goes on closing.

        Raises:
          EngineStuck, RuntimeError, BaseException: as ``close``.
        """
        if self._stop():
            await asyncio.wait([asyncio.wrap_future(self._engine_run.over)], timeout=timeout)
            self._stopped(timeout)

    def _stop(self) -> bool:
        """Begin to close; return True if there is an end to wait for."""
        if os.getpid() != self._pid:
            return False  # a forked child has no such thread
        if threading.current_thread() is self._thread:
            raise RuntimeError("close() on the engine's own thread would wait for itself")
        self._engine_run.stop()
        with self._starting:
            return self._started

    def _stopped(self, timeout: float | None) -> None:
        if not self._engine_run.over.done():
            raise EngineStuck(f"close: the engine did not end within {timeout} s; {self._location()}")
        self._thread.join()
        if self._engine_run.error is not None and not self._engine_run.error_was_raised:
            self._engine_run.error_was_raised = True
            raise self._engine_run.error

    def _submit(self, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        job = Job(fn, args, kwargs)
        self._refuse_after_fork(job.name)
        self._engine_run.submit(job)
        return job

    def _cancel_and_wait(self, job: Job) -> None:
        self._engine_run.cancel(job)
        try:
            job.over.result(self.grace)
        except TimeoutError:
            raise EngineStuck(
                f"{job.name} was cancelled and did not end within {self.grace} s; {self._location()}"
            ) from None

    def _location(self) -> str:
        return f"its thread is in {stack_of(self._thread.ident)}"

    def _refuse_after_fork(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise EngineForked(
                f"{what}: this engine runs in process {self._pid}, and this is process {os.getpid()}, forked from it; open "
                "another engine here"
            )

    def _close_at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._engine_run.error_was_raised = True  # no code is left to raise it to
        try:
            self.close(timeout=self.grace)
        except EngineStuck as error:
            self._engine_run.abandon(error)


def _looked_at(future: "asyncio.Future[Any]") -> None:
    """Retrieve the exception, or asyncio complains of a failed start that is no longer waited for."""
    if not future.cancelled():
        future.exception()


@contextmanager
def open_engine_thread(
    lifespan: Callable[[], AbstractAsyncContextManager[V]], *, grace: float = 60.0, start_timeout: float | None = None
) -> Generator[EngineThread[V]]:
    """Run an engine on a thread until the block is left. From a synchronous program.

    Entering blocks until the lifespan has yielded. Leaving closes the engine and blocks until everything is cleaned up, at
    most ``grace`` seconds, which should exceed ``Deadlines.drain``. The body's own exception comes out as itself.

    An asyncio program uses ``aopen_engine_thread``, which does not block the loop.

    Raises:
      EngineStuck: the engine was not ready after ``start_timeout``, or not closed after ``grace`` seconds.
      BaseException: the lifespan's exception, if it was not raised to a caller before.
    """
    thread = EngineThread(lifespan, grace=grace)
    try:
        yield thread.start(start_timeout)
    except BaseException:
        with contextlib.suppress(Exception):  # the body's own error says more
            thread.close(grace)
        raise
    thread.close(grace)


@asynccontextmanager
async def aopen_engine_thread(
    lifespan: Callable[[], AbstractAsyncContextManager[V]], *, grace: float = 60.0, start_timeout: float | None = None
) -> AsyncGenerator[EngineThread[V]]:
    """Like ``open_engine_thread``, from asyncio, whose loop goes on while the engine starts and while it ends.

    Cancelled, a start is given up. ``asyncio.to_thread(opened.__enter__)`` is no substitute: ``asyncio.run`` waits for its threads
    before it lets a SystemExit or a KeyboardInterrupt out, and so for a start that may never end.

    Raises:
      EngineStuck, BaseException: as ``open_engine_thread``.
    """
    thread = EngineThread(lifespan, grace=grace)
    try:
        yield await thread.astart(start_timeout)
    except BaseException:
        with contextlib.suppress(Exception):  # the body's own error says more
            await thread.aclose(grace)  # noqa: ASYNC102  asyncio, and bounded
        raise
    await thread.aclose(grace)


def call_at_exit(method: Callable[[], None]) -> None:
    """On any thread: have a bound method called at the end of the interpreter, unless its object is gone by then.

    The interpreter joins the program's threads before it runs ``atexit``, and a thread that waits for the engine would wait for
    ever. So the method is called where ``concurrent.futures`` ends its workers, by the same private hook (checked with Python
    3.11 to 3.13). Nothing can be taken out of it again, hence the weak reference. Decision:
    docs/decisions/0019-whose-fault-an-exception-is.md.
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
    """On the main thread: let SIGTERM raise SystemExit(143) inside the block, so that blocks are left and atexit runs.

    The default action ends the process at once, with nothing cleaned up; container runtimes and ``ray stop`` send SIGTERM
    first. Only the main thread can set signal handlers. Leaving puts the previous handler back; a handler that C code had
    installed cannot be put back by Python, and the default action takes its place.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
