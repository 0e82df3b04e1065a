"""What a simulated run may be stopped for. All are AssertionErrors: a test that meets one has failed.

The digest of a run: a hash over which task was stepped when, in order.

Ends a simulated run that would not end by itself: deadlock, livelock, too much simulated time, a broken invariant.

Invariants:
1. The first verdict stays, with the task tree of that moment; whatever happens while the run unwinds does not replace it.
2. A stopped run ends whatever its tasks do. It is cancelled first, so that it cleans up after itself; then its shields
   are taken away; then its tasks get an exception they did not ask for; last they are ended without being asked.

A thread that ends a run which Trio itself can no longer end: a step that does not return.

It looks every ``stuck_after`` wall-clock seconds whether steps have been taken since; so a stall is found after one to two
such times. The stuck thread gets an exception that no ``except Exception`` stops. Only a call into C that never returns
escapes: then the stack is printed, so that one sees at least which one.
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
    """Root of these errors. The message ends with the task tree of the moment the run was stopped."""


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
    """Something that must hold between any two steps did not."""


class InstrumentDropped(SimStopped):
    """An instrument raised during the run. Trio logs that and goes on without it, so its checks were not made."""


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
        """Take the step into the digest: the task's number within the run, its function at first sight, the time."""
        if self._oldest is None:
            self._oldest = age(task)
        number = age(task) - self._oldest
        self.steps += 1
        self._hash.update(_RECORD.pack(number, trio.current_time()))
        if number not in self._named:  # its name is left out: repr()s in it may hold addresses
            self._named.add(number)
            self._hash.update(getattr(task.coro, "__qualname__", "").encode())

    @property
    def digest(self) -> str:
        """The digest so far, as hex digits."""
        return self._hash.hexdigest()


_UNSHIELD, _THROW, _ABANDON = 1, 2, 4
"""Stages of invariant 2, after the cancellation."""
_GRACE_STEPS = 5_000
"""Steps that a stopped run gets for each stage of invariant 2: enough to abort what some hundred rollouts have in flight."""


class _Ended(BaseException):
    """Thrown into tasks of a stopped run that cancellation does not end; seen by nobody but them."""


@final
class RunGuard(trio.abc.Instrument):
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


class _Stalled(BaseException):
    """Raised inside the step that does not end."""


@contextmanager
def stall_watch(guard: RunGuard, *, stuck_after: float) -> Generator[None]:
    """Watch the run of this thread meanwhile; where its limit is one of real time, also stop it after that."""
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
    """Take an interrupt that came when the step had just ended.

    Not by PyThreadState_SetAsyncExc(None): in CPython 3.11 that leaves the thread looking for an exception for ever, which
    makes all that follows slower, and hangs under cProfile.
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
    """Whether the thread is in Trio's own wait for the network, where real time may pass."""
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
