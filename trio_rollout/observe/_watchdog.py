"""The step watchdog: names every task step that blocks the event loop for too long, and the code that it ran.

It costs one to two microseconds a step (a bare checkpoint costs five), so it may stay on. A thread takes the stack of the event
loop's thread while a step goes on for too long. It is the only thread of the package that is not Trio's: an observer of a blocked
loop must not wait for the loop. It can look only while the blocking code lets other threads run; code that holds the GIL is named
at the end of its step.
"""

import itertools
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import FrameType
from typing import TypeAlias, final

import attrs
import trio

from .._util.user_code import logging_failures
from ._frames import where

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


_MOST_KEPT = 100


@final
@attrs.frozen(kw_only=True)
class SlowStep:
    """A task step that took too long: nothing else could run meanwhile."""

    task: str
    """The task's name."""
    where: str
    """``task @ function:line``: the await at which the step ended."""
    seconds: float
    stack: tuple[str, ...]
    """The functions that it ran, outermost first, if they could be seen while it lasted."""

    def __str__(self) -> str:
        doing = f", in {self.stack[-1]}" if self.stack else ""
        return f"{self.where} blocked the event loop for {self.seconds:.3f} s{doing}"


@final
class StepWatchdog(trio.abc.Instrument):
    """Measures every task step. ``open_step_watchdog`` makes one and installs it."""

    def __init__(self, *, threshold: float, on_slow: Callable[[SlowStep], None] | None = None) -> None:
        if not threshold > 0:
            raise ValueError(f"StepWatchdog: threshold must be above 0 seconds, got {threshold!r}")
        self.threshold = threshold
        self.slow: deque[SlowStep] = deque(maxlen=_MOST_KEPT)
        """The last slow steps."""
        self.count: int = 0
        """The number of slow steps."""
        self.longest_s: float = 0.0
        """Duration of the longest step."""
        self._on_slow = on_slow
        # One attribute each, with all that belongs together: both are read and written by two threads without a lock.
        self._step: Step | None = None
        self._sample: tuple[Step, tuple[str, ...]] | None = None

    def __repr__(self) -> str:
        return f"<StepWatchdog {self.count} steps above {self.threshold:g} s, longest {self.longest_s:.3f} s>"

    def current(self) -> Step | None:
        """The step under way; may be called from any thread."""
        return self._step

    def seen(self, step: Step, stack: tuple[str, ...]) -> None:
        """The sampler saw this step at this place; may be called from any thread."""
        self._sample = (step, stack)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Trio calls it."""
        self._step = (task, wall_clock())

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Trio calls it."""
        step = self._step
        if step is None:  # it was installed during this very step
            return
        self._step = None
        seconds = wall_clock() - step[1]
        self.longest_s = max(self.longest_s, seconds)
        if seconds > self.threshold:
            sample = self._sample
            stack = sample[1] if sample is not None and sample[0] is step else ()
            self._report(SlowStep(task=task.name, where=where(task), seconds=seconds, stack=stack))

    def _report(self, slow: SlowStep) -> None:
        self.count += 1
        self.slow.append(slow)
        if self._on_slow is None:
            _LOGGER.warning("%s", slow)
            return
        with logging_failures(_LOGGER, "on_slow raised for: %s", slow):
            self._on_slow(slow)


@asynccontextmanager
async def open_step_watchdog(
    *, threshold: float = 0.1, on_slow: Callable[[SlowStep], None] | None = None, sample: bool = True
) -> AsyncGenerator[StepWatchdog]:
    """Watch the steps of this Trio run until the block is left; slow ones are logged, or go to ``on_slow``.

    ``threshold`` is in seconds of real time. With ``sample`` a thread takes the stack of a step while it still blocks.
    Entering and leaving do not block. ``on_slow`` is called between two steps: it must not block either.
    """
    await trio.lowlevel.checkpoint()
    watchdog = StepWatchdog(threshold=threshold, on_slow=on_slow)
    with ExitStack() as stack:
        if sample:
            stack.enter_context(sampling(watchdog.current, watchdog.seen, threshold=threshold))
        trio.lowlevel.add_instrument(watchdog)
        stack.callback(_remove, watchdog)
        yield watchdog


def _remove(watchdog: StepWatchdog) -> None:
    try:
        trio.lowlevel.remove_instrument(watchdog)
    except KeyError:  # Trio drops an instrument that raised
        _LOGGER.warning("the step watchdog failed and has not been watching to the end")
