"""Whether a suspended asyncio task is cleaning up after a cancellation, or has swallowed it.

Cancellation is delivered again until it is heeded. But an ``await`` inside ``finally`` or ``except CancelledError`` is the
heeding, and a second delivery would tear it off half-way. A suspended coroutine keeps the exception that it is handling;
the garbage collector's view of it shows it, and there is no other way to ask.
"""

import asyncio
import gc
import types
from collections.abc import Iterator
from typing import Any

# How many coroutines deep a task is looked into; recursion deeper than that is not cleanup.
_DEPTH = 200


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


def is_cleaning_up(task: "asyncio.Task[Any]") -> bool:
    """Whether one of its coroutines is suspended while it handles a CancelledError. Call it on the loop's own thread."""
    return any(isinstance(item, asyncio.CancelledError) for frame in _chain(task) for item in gc.get_referents(frame))
