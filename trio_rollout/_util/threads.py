"""Blocking functions in threads: the port that a simulation replaces, and scorers in threads.

The end of a real thread has nothing to do with a virtual clock, which would run away from it. So code that calls blocking
functions takes a ``RunSync``; the default is ``run_in_thread``, and ``trio_rollout.testing.run_inline`` is for simulations.

``in_thread`` makes a synchronous scorer async. A thread can't be stopped: when a call is cancelled, its thread goes on and
is counted as hung until it ends. Too many of them are an error, because each holds memory, and the processor if it spins.
"""

import inspect
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, TypeVarTuple, final

import attrs
import trio

from .._core.checks import whole
from .._core.failures import classes_of, words_of
from ..errors import RewardError
from .arguments import refuse, require_callable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class RunSync(Protocol):
    """Runs a blocking function outside of the event loop and returns its result."""

    async def __call__(self, fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Run ``fn(*args)``."""
        ...


async def run_in_thread(fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
    """Run a function that is bounded in time, such as a read of a local file, in a thread of Trio's pool.

    Blocks until a thread is free and the function has returned. Cancelled before it has started, it never runs; later
    its end is waited for and its result returned, so that nothing runs on after the call.
    """
    limiter = trio.to_thread.current_default_thread_limiter()
    return await trio.to_thread.run_sync(fn, *args, abandon_on_cancel=False, limiter=limiter)


R = TypeVar("R")


@final
@attrs.define(eq=False, repr=False)
class InThread(Generic[T, R]):
    """Made by ``in_thread``: call it like the function, with ``await``."""

    _fn: Callable[[T], R]
    limit: int = attrs.field(kw_only=True, validator=whole(1))
    max_hung: int = attrs.field(kw_only=True, validator=whole(0))
    _slots: trio.CapacityLimiter = attrs.field(init=False)
    _threads: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(math.inf), init=False)
    """Counts the threads, hung ones too; the slots bound how many of them are waited for."""
    _awaited: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._slots = trio.CapacityLimiter(self.limit)

    @property
    def running(self) -> int:
        """The number of calls in a thread that are waited for."""
        return self._awaited

    @property
    def hung(self) -> int:
        """The number of threads whose call was cancelled and that have not ended yet."""
        return self._threads.borrowed_tokens - self._awaited

    def __repr__(self) -> str:
        return f"<in_thread({scorer_name(self._fn)}): {self.running} of {self.limit} running, {self.hung} of {self.max_hung} hung>"

    async def __call__(self, value: T, /) -> R:
        """Run the function in a thread.

        Blocks until one of ``limit`` slots is free and the function has returned. Cancelled, the slot is free at once;
        **the thread itself goes on** until the function returns, and its result is thrown away.

        Raises:
          RewardError: more than ``max_hung`` threads hang; or the function raised an exception that is no ``Exception``,
            such as SystemExit, which is the error's cause.
          Exception: the function's own exception, as itself.
        """
        async with self._slots:
            if self.hung > self.max_hung:
                raise RewardError(
                    f"{self!r}: {self.hung} threads hang, {self.max_hung} are allowed; a scorer that can hang belongs "
                    "into in_process"
                )
            self._awaited += 1
            try:
                # The thread is counted in _threads before this first yields, and until it ends.
                return await trio.to_thread.run_sync(
                    self._run, value, abandon_on_cancel=True, limiter=self._threads, thread_name=scorer_name(self._fn)
                )
            finally:
                self._awaited -= 1

    def _run(self, value: T) -> R:
        """Call the function, in its thread: what it raises there is its own, a KeyboardInterrupt too (decision 0019)."""
        try:
            return self._fn(value)
        except Exception:
            raise
        except BaseException as error:  # noqa: ASYNC103  no cancellation: this is not Trio's thread
            name, raised = scorer_name(self._fn), type(error).__qualname__
            raise RewardError(f"{name} raised {raised}: {words_of(error)}", raised=classes_of(error)) from error  # noqa: ASYNC104  a real cancellation was raised again above


def scorer_name(fn: object) -> str:
    """Return a scorer's name for messages."""
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def in_thread(fn: Callable[[T], R], *, limit: int = 8, max_hung: int = 8) -> InThread[T, R]:
    """Make a synchronous scorer async: at most ``limit`` calls at once, each in a thread.

    For scorers that wait (a database, an HTTP client) or release the GIL. One that computes, or may never return, belongs
    into ``in_process``.

    Raises:
      SettingsError: ``limit`` or ``max_hung`` is out of its range, or ``fn`` is no synchronous function.
    """
    require_callable("fn", fn, "a synchronous function")
    if inspect.iscoroutinefunction(inspect.unwrap(fn)):
        raise refuse("fn", fn, "a synchronous function; an async one needs no thread around it")
    return InThread(fn, limit=limit, max_hung=max_hung)
