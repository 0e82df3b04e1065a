"""Raise in a user's callback at each of its awaits, in one run for each, and check that the error was handled.

The exception is raised when the callback starts, and at each await in place of its result, also while the callback is being
cancelled. With ``exc=KeyboardInterrupt`` it is Ctrl-C while the user's code runs: the scenario may then end by it, and the
check gets the state that ``faults.keep(state)`` was given.
"""

import functools
import random
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeAlias, TypeVar, final

from ...observe._frames import frame_label
from .._points import Inject, Point, Sweep
from .sweeper import Notes, Sweeper

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")

Raises: TypeAlias = Callable[[str], BaseException]
"""An exception class, or a function that makes the exception from a message."""


@final
class Faults(Notes[S]):
    """The scenario's argument: ``faults(fn)`` is the user's function with the fault in it."""

    def __init__(self, make: Raises, *, at: int) -> None:
        super().__init__()
        self.awaits: int = 0
        self.where: str = ""
        self._make = make
        self._at = at

    def __call__(self, async_fn: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Return ``async_fn`` with the fault: it may be raised when it starts, and at each of its awaits."""
        name = getattr(async_fn, "__name__", type(async_fn).__name__)

        @functools.wraps(async_fn, updated=())
        async def faulty(*args: P.args, **kwargs: P.kwargs) -> T:
            self.step(name)
            return await _driven(
                _as_coroutine(async_fn(*args, **kwargs)), lambda coro: self.step(f"{name} @ {_line(coro)}")
            )

        return faulty

    def step(self, where: str) -> None:
        """Count one await, and raise if it is the planned one."""
        self.awaits += 1
        if self.awaits == self._at:
            self.where = where
            raise self._make(f"injected at await {self._at}: {where}")


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _line(coro: Coroutine[Any, Any, Any]) -> str:
    """Return the callback's position: its innermost frame that is neither Trio's nor this file's."""
    inner: Any = coro
    label = "its start"
    while inner is not None:
        frame = getattr(inner, "cr_frame", None)
        if frame is not None and "/trio/" not in frame.f_code.co_filename and frame.f_code.co_filename != __file__:
            label = frame_label(frame, frame.f_lineno)
        inner = getattr(inner, "cr_await", None)
    return label


@types.coroutine
def _driven(
    coro: Coroutine[Any, Any, T], before_resume: Callable[[Coroutine[Any, Any, T]], None]
) -> Generator[Any, Any, T]:
    """Run ``coro`` by hand, so that an exception can replace the result of an await."""
    resume: Callable[[Any], Any] = coro.send
    value: Any = None
    while True:
        try:
            trap = resume(value)
        except StopIteration as stop:
            result: T = stop.value
            return result  # ruff: ignore[return-in-generator]  a generator-based coroutine returns like any other
        try:
            resume, value = coro.send, (yield trap)
            before_resume(coro)
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103 - every exception is the callback's
            resume, value = coro.throw, error


def throw_everywhere(
    scenario: Callable[[Faults[S]], Awaitable[S]],
    check: Callable[[S, Point | None], object],
    *,
    exc: Raises = RuntimeError,
    seed: object = 0,
    sample: int | None = None,
    limit: float = 86400.0,
    max_steps: int = 200_000,
    virtual_time: bool = True,
) -> Sweep:
    """Run ``scenario`` undisturbed, then once for each await of its user callbacks with an exception raised there.

    ``scenario(faults)`` passes ``faults(fn)`` to the code under test in place of the user's ``fn``, and returns a state.
    ``check(state, point)`` raises, or returns False, if the exception was lost: it must have become a recorded failure or
    another try. ``exc`` is the exception's class, of any kind, or makes the exception from a message. An exception at a
    point, of the scenario or of the check, is that point's failure, a SystemExit too.

    Raises:
      BaseException: the error of the undisturbed run, or of its check.

    """
    sweeper = Sweeper(check=check, seed=seed, limit=limit, max_steps=max_steps, virtual_time=virtual_time)
    counting: Faults[S] = Faults(exc, at=0)
    sweeper.judge(sweeper.once(lambda: scenario(counting), counting), None)
    awaits = range(1, counting.awaits + 1)
    draw = random.Random(f"throw_everywhere-{seed}")
    for at in awaits if sample is None or sample >= len(awaits) else draw.sample(awaits, sample):
        _try(sweeper, scenario, Faults(exc, at=at), at)
    return sweeper.report()


def _try(sweeper: Sweeper[S], scenario: Callable[[Faults[S]], Awaitable[S]], faults: Faults[S], at: int) -> None:
    sweeper.attempt(
        lambda: sweeper.once(lambda: scenario(faults), faults),
        lambda: Point(how=Inject.THROW, step=at, where=faults.where),
        faults,
        interrupts=True,
    )
