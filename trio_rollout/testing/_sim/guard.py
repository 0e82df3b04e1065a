"""Guards a simulated run: stops one that would not end, checks invariants before each step, and hashes the steps.

A run is stopped for a deadlock, a livelock, too much simulated time, a step that does not return, or a broken invariant. The
errors are AssertionErrors: a test that meets one has failed.

Invariants:

1. The first verdict stays, with the task tree of that moment; nothing that happens while the run unwinds replaces it.
2. A stopped run ends, whatever its tasks do. First it is cancelled, so that it can clean up; then its shields are removed;
   then an exception is thrown into its tasks; at last they are ended by force.

A step that does not return is beyond Trio: a thread checks every ``stuck_after`` wall-clock seconds that steps have been
taken, and so finds a stall after one to two such times. It raises in the stuck thread an exception that no ``except
Exception`` stops. Only a call into C that never returns escapes; then the stack is printed.
"""

import ctypes
import hashlib
import math
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import final

import trio

from ...observe._frames import where
from ...observe._tree import task_tree
from .._invariants import Invariants
from . import scheduler
from .scheduler import age


class SimStopped(AssertionError):
    """The base of these errors. The message ends with the task tree at the moment of the stop."""


class SimDeadlock(SimStopped):
    """No task can run, and no deadline is left that would wake one."""


class SimTimeout(SimStopped):
    """The run would have gone on beyond its limit of simulated time."""


class SimLivelock(SimStopped):
    """The run took more task steps than allowed."""


class SimStalled(SimStopped):
    """One step did not end: a loop that never yields, or a call that blocks the thread."""


class SystemTaskLeft(SimStopped):
    """A system task was still running when the main function had returned: it had no owner."""


class InvariantBroken(SimStopped):
    """An invariant did not hold between two steps."""


class InstrumentDropped(SimStopped):
    """An instrument raised during the run. Trio logs that and drops the instrument, so its checks were not made."""


_RECORD = struct.Struct("<qd")


@final
class StepTrace(trio.abc.Instrument):
    """Counts and hashes every task step; equal digests mean the same interleaving at the same times."""

    def __init__(self) -> None:
        self.steps = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._oldest: int | None = None
        self._named: set[int] = set()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Add the step to the digest: the task's number in the run, its function if it is new, the time."""
        if self._oldest is None:
            self._oldest = age(task)
        number = age(task) - self._oldest
        self.steps += 1
        self._hash.update(_RECORD.pack(number, trio.current_time()))
        if number not in self._named:  # its name is left out: it may contain addresses
            self._named.add(number)
            self._hash.update(getattr(task.coro, "__qualname__", "").encode())

    @property
    def digest(self) -> str:
        """The digest so far, as hex digits."""
        return self._hash.hexdigest()


_UNSHIELD, _THROW, _ABANDON = 1, 2, 4
"""Stages of invariant 2, after the cancellation."""
_GRACE_STEPS = 5_000
"""Steps that a stopped run gets for each stage of invariant 2: enough to abort the requests of some hundred rollouts."""


class _Ended(BaseException):
    """Thrown into the tasks of a stopped run that cancellation does not end; no one else sees it."""


@final
class RunGuard(trio.abc.Instrument):
    """Watches one run. ``scope`` surrounds the main function; ``verdict`` is the reason for a stop, or None."""

    def __init__(self, *, limit: float, max_steps: int, virtual_time: bool, invariants: Invariants | None) -> None:
        self.trace = StepTrace()
        self.scope = trio.CancelScope()
        self.verdict: SimStopped | None = None
        self.token: trio.lowlevel.TrioToken | None = None
        self.wall_limit = None if virtual_time else limit
        """The limit in seconds of real time, for runs without virtual time."""
        self._limit = limit
        self._max_steps = max_steps
        self._virtual_time = virtual_time
        self._invariants = Invariants() if invariants is None else invariants
        self._until = math.inf
        self._stage = 0
        self._patience = max_steps

    def begin(self) -> None:
        """Start the limited time; the main task calls this first."""
        self._until = trio.current_time() + self._limit
        self.token = trio.lowlevel.current_trio_token()

    def stop(self, verdict: SimStopped) -> None:
        """Stop the run for this reason; more forcefully if it is already being stopped. Called in the run's thread."""
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
        """Stop the run if nothing can happen any more."""
        if timeout > 0 or not self._virtual_time or not scheduler.is_idle():
            return
        then = scheduler.next_deadline()
        if then == math.inf:
            self.stop(SimDeadlock(f"deadlock: nothing can wake any task\n{_thread_hint()}{task_tree()}"))
        elif then > self._until and self.verdict is None:
            self.stop(SimTimeout(f"nothing to do before the limit of {self._limit:g} simulated s\n{task_tree()}"))

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Check the invariants and the step limit; force the task that is about to run if a stopped run does not end."""
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
    """Return a hint if a task waits for a real thread or socket, which virtual time does not wait for."""
    for task in _user_tasks():
        for frame, _ in task.iter_await_frames():
            if frame.f_code.co_name in {"to_thread_run_sync", "wait_readable", "wait_writable"}:
                return (
                    f"({task.name} waits for a real thread or socket ({frame.f_code.co_name}): virtual time does not wait "
                    "for those; use the simulated ports, or virtual_time=False)\n"
                )
    return ""


class _Stalled(BaseException):
    """Raised inside the step that does not end."""


@contextmanager
def stall_watch(guard: RunGuard, *, stuck_after: float) -> Generator[None]:
    """Watch the run of this thread from another thread; stop it at its limit of real time, if it has one."""
    over = threading.Event()
    engine = threading.get_ident()

    def watch() -> None:
        limit, steps = guard.wall_limit, -1
        left = limit
        while not over.wait(stuck_after if left is None else min(stuck_after, left)):
            if left is not None and (left := max(left - stuck_after, 0.0)) <= 0.0:
                _soon(lambda: guard.stop(SimTimeout(f"not over after {limit:g} s\n{task_tree()}")), guard)
                left = min(stuck_after, 1.0)
            if guard.trace.steps == steps and not _waits(engine):
                _interrupt(engine, guard, stuck_after)
            steps = guard.trace.steps

    thread = threading.Thread(target=watch, name="trio_rollout.testing stall watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _absorb()


def _absorb() -> None:
    """Absorb an interrupt that arrived when the step had just ended.

    Not by PyThreadState_SetAsyncExc(None): in CPython 3.11 the thread then looks for an exception for ever, which makes
    everything after it slower, and hangs under cProfile.
    """
    with suppress(_Stalled):
        for _ in range(100):  # a pending exception is raised at the next jump back
            continue


def _soon(act: Callable[[], None], guard: RunGuard) -> None:
    if guard.token is not None:
        try:
            guard.token.run_sync_soon(act)
        except trio.RunFinishedError:
            return


def _waits(engine: int) -> bool:
    """Return True if the thread is in Trio's wait for I/O, where real time may pass."""
    frame = sys._current_frames().get(engine)
    return frame is None or frame.f_code.co_name == "get_events"


def _interrupt(engine: int, guard: RunGuard, stuck_after: float) -> None:
    frame = sys._current_frames().get(engine)
    stack = "".join(traceback.format_stack(frame)[-12:])
    verdict = SimStalled(
        f"no task step ended for more than {stuck_after:g} s of wall-clock time, the thread is at\n{stack}"
    )
    if guard.verdict is None:
        guard.verdict = verdict
    else:
        print(verdict, file=sys.stderr)  # ruff: ignore[print]  the first exception did not help: it may be inside C
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(engine), ctypes.py_object(_Stalled))
