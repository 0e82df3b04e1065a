"""Whether a suspended asyncio task is cleaning up after a cancellation, or has swallowed it.

Cancellation is delivered again until it is heeded. But an ``await`` inside ``finally`` or ``except CancelledError`` is the
heeding, and a second delivery would tear it off half-way. A suspended coroutine keeps the exception that it is handling.
There is no way to ask for that, but the garbage collector visits it, and **after everything else**: the last thing that a
suspended coroutine refers to is the exception that it handles, None where it has handled one before, or else what it awaits
(CPython 3.11 to 3.13, where tests pin it). An exception that somebody only keeps, in a variable or on the stack, is visited earlier.
"""

import asyncio
import contextlib
import gc
import types
from collections.abc import Iterator
from typing import Any, Final

# How many coroutines deep a task is looked into; recursion deeper than that is not cleanup.
_DEPTH: Final = 200
_MARK: Final = "_trio_rollout_asked"
_FRAMES: Final = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


def mark(error: BaseException) -> None:
    """Note of a CancelledError that it came after one was asked for: what is raised while it is handled belongs to the cleanup."""
    with contextlib.suppress(AttributeError):
        setattr(error, _MARK, True)


def _awaited_by(frame: object) -> Any:
    if isinstance(frame, types.CoroutineType):
        return frame.cr_await
    if isinstance(frame, types.GeneratorType):
        return frame.gi_yieldfrom
    if isinstance(frame, types.AsyncGeneratorType):
        return frame.ag_await
    # What stands between a coroutine and an async generator, or a wrapped coroutine, has no name for what it awaits.
    below = (types.CoroutineType, types.AsyncGeneratorType)
    return next((item for item in gc.get_referents(frame) if isinstance(item, below)), None)


def _chain(task: "asyncio.Task[Any]") -> Iterator[object]:
    current: Any = task.get_coro()
    for _ in range(_DEPTH):
        if current is None or isinstance(current, asyncio.Future):
            return
        yield current
        current = _awaited_by(current)


def _handled_by(frame: object) -> BaseException | None:
    last = gc.get_referents(frame)[-1:] if isinstance(frame, _FRAMES) else []
    return last[0] if last and isinstance(last[0], BaseException) else None


def _is_cancellation(error: BaseException | None) -> bool:
    """Whether a CancelledError is handled, or something that was raised while one that was asked for was.

    A TimeoutError was made of a CancelledError as well, but of one that nobody here had asked for.
    """
    if isinstance(error, asyncio.CancelledError):
        return True
    for _ in range(_DEPTH):
        if error is None or hasattr(error, _MARK):
            break
        error = error.__context__
    return error is not None


def is_cleaning_up(task: "asyncio.Task[Any]") -> bool:
    """Whether one of its coroutines is suspended while it handles a CancelledError. Call it on the loop's own thread."""
    return any(_is_cancellation(_handled_by(frame)) for frame in _chain(task))
