"""The scheduler hooks: every private name of Trio that the simulation uses, in one file.

A simulated run must be a function of its seed, and must end even if its tasks refuse to. Trio has no public interface for
either; these are the places where the simulation reaches in:

- *The order of tasks.* Trio runs the runnable tasks in batches, in an order that depends on how they became runnable and on a
  private ``Random``. With its flag for Hypothesis, Trio sorts each batch by the tasks' age and shuffles it with that ``Random``:
  ``seeded_scheduler`` sets the flag, seeds the ``Random``, and restores both.
- *What can still happen.* Virtual time jumps when no task can run. ``is_idle`` and ``next_deadline`` tell a pause until the
  next deadline from a deadlock, in which there is none.
- *Force.* A stopped run is cancelled; a shield, a wait that refuses to be cancelled, or a loop that swallows Cancelled can keep
  it alive. ``unshield``, ``throw_into_parked``, ``throw_on_next_step`` and ``abandon`` take these from it, in this order (``run``).
- *Ctrl-C.* ``interrupt`` does what Trio's signal handler does, at a chosen step.

The package pins Trio's minor version because of this file. tests/testing/test_canary.py fails if a name still exists and no
longer does what it did.
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
    """Make the order of tasks within a batch a function of ``seed`` inside the block; restore everything afterwards."""
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
    """Return a number that grows with each task that the process starts; only differences have a meaning."""
    return task._counter


def is_idle() -> bool:
    """Return True if nothing can happen before the next deadline: no runnable task, no waiter for idleness, no callback."""
    runner = _run.GLOBAL_RUN_CONTEXT.runner
    queued = runner.entry_queue.queue or runner.entry_queue.idempotent_queue
    return not (runner.runq or runner.waiting_for_idle or queued)


def next_deadline() -> float:
    """Return the next deadline of any scope of this run; ``inf`` if there is none."""
    return float(_run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline())


def scope_is_over(scope: trio.CancelScope) -> bool:
    """Return True if the scope has been entered and left."""
    return scope._has_been_entered and scope._cancel_status is None


def interrupt() -> None:
    """Deliver Ctrl-C as Trio's signal handler does while protected code runs: at the main task's next checkpoint."""
    _run.GLOBAL_RUN_CONTEXT.runner.deliver_ki()


def is_user_task(task: Task) -> bool:
    """Return True unless the task is one of the two that Trio itself needs."""
    return task.parent_nursery is not None and not task.name.startswith("<TrioToken")


def unshield(task: Task) -> None:
    """Remove every shield around the task, so that a cancellation from outside reaches it."""
    status = task._cancel_status
    while status is not None:
        status._scope.shield = False
        status = status._parent  # type: ignore[assignment]  # None at the outermost


def throw_on_next_step(task: Task, error: BaseException) -> None:
    """Resume the task with ``error``; to be called from ``before_task_step`` of this task."""
    task._next_send_fn = task.coro.throw
    task._next_send = error


def throw_into_parked(task: Task, error: BaseException) -> None:
    """Wake a waiting task with ``error``, even if its wait refuses to be cancelled."""
    if task._next_send_fn is None:
        trio.lowlevel.reschedule(task, outcome.Error(error))


def abandon(task: Task, error: BaseException) -> None:
    """End the task with ``error``, whatever its code does; to be called from ``before_task_step`` of this task."""

    def end(_: object) -> None:
        with suppress(BaseException):  # it may refuse to be closed too; then nothing is left to try
            task.coro.close()
        raise error

    task._next_send_fn = end
    task._next_send = error
