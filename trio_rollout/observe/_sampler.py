"""A thread that takes the stack of the event loop's thread while a step goes on for too long.

It is the only thread of the package that is not Trio's: an observer of a blocked loop must not wait for the loop. It can
look only while the blocking code lets other threads run; code that holds the GIL is named by the step watchdog at its end.
"""

import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

import trio

_LOGGER = logging.getLogger("trio_rollout.observe")

wall_clock = time.perf_counter
"""Seconds of real time, also where a run's own clock is virtual."""

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 0.5
_DEEPEST = 30


Step: TypeAlias = tuple[trio.lowlevel.Task, float]
"""One task step under way, and the time when it began. A step is recognised by the identity of its tuple."""


def stack_of(frame: FrameType | None, *, below: str) -> tuple[str, ...]:
    """Return ``function (file:line)`` of the frames below the outermost function of the name ``below``, outermost first."""
    entries = [
        f"{inner.f_code.co_qualname} ({inner.f_code.co_filename}:{line})" for inner, line in traceback.walk_stack(frame)
    ]
    own = list(itertools.takewhile(lambda entry: not entry.startswith(f"{below} ("), entries))
    return tuple(reversed(own[:_DEEPEST]))


@contextmanager
def sampling(
    current: Callable[[], Step | None], seen: Callable[[Step, tuple[str, ...]], None], *, threshold: float
) -> Generator[None]:
    """Watch this thread's steps during the block: one that takes longer than ``threshold`` seconds is logged with its stack.

    A step that goes on is logged again each time its duration has doubled, which shows if it moves. ``seen`` is called each
    time, in the sampling thread.
    """
    over = threading.Event()
    engine = threading.get_ident()

    def watch() -> None:
        last: Step | None = None
        due = threshold
        while not over.wait(min(max(threshold / 2, _SHORTEST_POLL_S), _LONGEST_POLL_S)):
            step = current()
            if step is not last:
                last, due = step, threshold
            if step is None or (lasted := wall_clock() - step[1]) <= due:
                continue
            due = 2 * lasted
            stack = stack_of(sys._current_frames().get(engine), below="unrolled_run")
            if current() is step:  # else it was over before the stack was taken, which then shows another one
                seen(step, stack)
                _LOGGER.warning(
                    "%s blocks the event loop, for %.2f s now:\n  %s", step[0].name, lasted, "\n  ".join(stack)
                )

    thread = threading.Thread(target=watch, name="trio_rollout step sampler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
