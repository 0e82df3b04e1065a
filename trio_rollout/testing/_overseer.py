"""Ends a simulated run that would not end by itself: deadlock, livelock, too much simulated time, a broken invariant.

Invariants:
1. The first verdict stays, with the task tree of that moment; whatever happens while the run unwinds does not replace it.
2. A stopped run ends whatever its tasks do. It is cancelled first, so that it cleans up after itself; then its shields
   are taken away; then its tasks get an exception they did not ask for; last they are ended without being asked.
"""

import math
from collections.abc import Iterator
from typing import final

import trio

from ..observe._frames import where
from ..observe._tree import task_tree
from . import _scheduler as scheduler
from ._invariants import Invariants
from ._sim_errors import InvariantBroken, SimDeadlock, SimLivelock, SimStopped, SimTimeout
from ._trace import StepTrace

_UNSHIELD, _THROW, _ABANDON = 1, 2, 4
"""Stages of invariant 2, after the cancellation."""
_GRACE_STEPS = 5_000
"""Steps that a stopped run gets for each stage of invariant 2: enough to abort what some hundred rollouts have in flight."""


class _Ended(BaseException):
    """Thrown into tasks of a stopped run that cancellation does not end; seen by nobody but them."""


@final
class Overseer(trio.abc.Instrument):
    """Watches one run. ``scope`` surrounds the main function; ``verdict`` says why it was stopped, if it was."""

    def __init__(self, *, limit: float, max_steps: int, virtual_time: bool, invariants: Invariants | None) -> None:
        self.trace = StepTrace()
        self.scope = trio.CancelScope()
        self.verdict: SimStopped | None = None
        self.token: trio.lowlevel.TrioToken | None = None
        self.wall_limit = None if virtual_time else limit
        """Limit in seconds of real time, for runs without virtual time."""
        self._limit = limit
        self._max_steps = max_steps
        self._virtual_time = virtual_time
        self._invariants = Invariants() if invariants is None else invariants
        self._until = math.inf
        self._stage = 0
        self._patience = max_steps

    def begin(self) -> None:
        """Start the simulated time that is limited; called by the main task first."""
        self._until = trio.current_time() + self._limit
        self.token = trio.lowlevel.current_trio_token()

    def stop(self, verdict: SimStopped) -> None:
        """Stop the run for this reason, or more forcefully if it is already being stopped. Called in the run's thread."""
        if self.verdict is None:
            self.verdict = verdict
            self._patience = self.trace.steps + _GRACE_STEPS
            self.scope.cancel(reason=type(verdict).__name__)
            return
        self._stage += 1
        for task in list(_user_tasks()):
            if self._stage == _UNSHIELD:
                scheduler.unshield(task)
            elif not task.child_nurseries:
                scheduler.throw_into_parked(task, _Ended())

    def before_io_wait(self, timeout: float) -> None:
        """Look whether anything can still happen."""
        if timeout > 0 or not self._virtual_time or not scheduler.is_idle():
            return
        then = scheduler.next_deadline()
        if then == math.inf:
            self.stop(SimDeadlock(f"deadlock: nothing can wake any task\n{_thread_hint()}{task_tree()}"))
        elif then > self._until and self.verdict is None:
            self.stop(SimTimeout(f"nothing to do before the limit of {self._limit:g} simulated s\n{task_tree()}"))

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count; and once the run is being stopped and does not end, force the task that is about to run."""
        if self.verdict is not None and self._stage >= _THROW and scheduler.is_user_task(task):
            (scheduler.throw_on_next_step if self._stage < _ABANDON else scheduler.abandon)(task, _Ended())
        if self.verdict is None and (broken := self._invariants.broken()) is not None:
            name, error = broken
            verdict = InvariantBroken(
                f"{name}: {error}\nbefore {where(task)}, time {trio.current_time():g}\n{task_tree()}"
            )
            verdict.__cause__ = error
            self.stop(verdict)
        if self.trace.steps > self._patience:
            self._patience = self.trace.steps + _GRACE_STEPS
            self.stop(SimLivelock(f"livelock: more than {self._max_steps} task steps\n{task_tree()}"))


def _user_tasks() -> Iterator[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    todo = [] if root is None else [root]
    while todo:
        task = todo.pop()
        if scheduler.is_user_task(task):
            yield task
        todo.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)


def _thread_hint() -> str:
    """Real threads and sockets do not count as something that may happen: say so where one is waited for."""
    for task in _user_tasks():
        for frame, _ in task.iter_await_frames():
            if frame.f_code.co_name in {"to_thread_run_sync", "wait_readable", "wait_writable"}:
                return (
                    f"({task.name} waits for a real thread or socket ({frame.f_code.co_name}): virtual time does not wait "
                    "for those; use the simulated ports, or virtual_time=False)\n"
                )
    return ""
