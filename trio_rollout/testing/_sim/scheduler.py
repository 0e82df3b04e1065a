"""Trio's private names, all of them that this room needs, in one file: a new Trio is checked here.

The package pins Trio's minor version for this file's sake, and tests/testing/test_canary.py notices when a name keeps
existing but no longer does what it did.
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import outcome
import trio
from trio._core import _run  # ruff: ignore[import-private-name]  what this file is for

Task = trio.lowlevel.Task


@contextmanager
def seeded_scheduler(seed: object) -> Generator[None]:
    """Make the order of tasks within a batch a function of ``seed`` while inside, and restore everything afterwards.

    Trio shuffles each batch. With its flag for Hypothesis set it sorts the batch by the tasks' age before, so that the
    shuffle depends on its private Random alone.
    """
    private: Any = _run
    state, flag = private._r.getstate(), private._ALLOW_DETERMINISTIC_SCHEDULING
    try:
        private._ALLOW_DETERMINISTIC_SCHEDULING = True
        private._r.seed(f"trio_rollout-{seed}")
        yield
    finally:
        private._r.setstate(state)
        private._ALLOW_DETERMINISTIC_SCHEDULING = flag


def age(task: Task) -> int:
    """A number that grows with each task the process starts; only differences mean anything."""
    return task._counter


def is_idle() -> bool:
    """Whether nothing can happen before the next deadline: no task runnable, none waits for exactly that, no callback queued."""
    runner = _run.GLOBAL_RUN_CONTEXT.runner
    queued = runner.entry_queue.queue or runner.entry_queue.idempotent_queue
    return not (runner.runq or runner.waiting_for_idle or queued)


def next_deadline() -> float:
    """The next deadline of any scope of this run, ``inf`` if there is none."""
    return float(_run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline())


def scope_is_over(scope: trio.CancelScope) -> bool:
    """Whether the scope has been entered and left."""
    return scope._has_been_entered and scope._cancel_status is None


def interrupt() -> None:
    """What Trio's signal handler does with Ctrl-C while protected code runs: the main task gets it at its next checkpoint."""
    _run.GLOBAL_RUN_CONTEXT.runner.deliver_ki()


def is_user_task(task: Task) -> bool:
    """Whether the task is none of the two that Trio itself needs."""
    return task.parent_nursery is not None and not task.name.startswith("<TrioToken")


def unshield(task: Task) -> None:
    """Take away every shield around the task, so that a cancellation from outside reaches it."""
    status = task._cancel_status
    while status is not None:
        status._scope.shield = False
        status = status._parent  # type: ignore[assignment]  # None at the outermost


def throw_on_next_step(task: Task, error: BaseException) -> None:
    """Replace what the task is about to be resumed with by ``error``; call it from ``before_task_step`` of this task."""
    task._next_send_fn = task.coro.throw
    task._next_send = error


def throw_into_parked(task: Task, error: BaseException) -> None:
    """Wake a task that waits for something, even for what refuses to be cancelled, with ``error``."""
    if task._next_send_fn is None:
        trio.lowlevel.reschedule(task, outcome.Error(error))


def abandon(task: Task, error: BaseException) -> None:
    """End the task with ``error`` whatever its code does; call it from ``before_task_step`` of this task."""

    def end(_: object) -> None:
        with suppress(BaseException):  # it may refuse to be closed, too: then nothing is left to try
            task.coro.close()
        raise error

    task._next_send_fn = end
    task._next_send = error
