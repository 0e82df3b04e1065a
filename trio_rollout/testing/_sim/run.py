"""Runs one async function under a seeded scheduler and a virtual clock, and guards the run: the same seed, the same interleaving.

A run that depends on its seed alone is repeated exactly, in another process too. So take random numbers from a seeded
``random.Random``, do not iterate over sets, and keep real sockets and threads out.

The guard stops a run for a deadlock, a livelock, too much simulated time, a step that does not return, or a broken invariant. The
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
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, NoReturn, TypeVar, TypeVarTuple, final

import attrs
import trio
import trio.testing

from ...observe._frames import where
from ...observe._tree import task_tree
from .._invariants import Invariants
from . import scheduler
from .scheduler import age, seeded_scheduler


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
        with suppress(trio.RunFinishedError):
            guard.token.run_sync_soon(act)


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


T = TypeVar("T")
Args = TypeVarTuple("Args")

WEEK = 7 * 86400.0


async def run_inline(fn: Callable[[*Args], T], /, *args: *Args) -> T:
    """Run the function on the loop itself: for a simulation, where nothing takes time. Cancelled, it has not run."""
    await trio.lowlevel.checkpoint()
    return fn(*args)


@final
@attrs.frozen(kw_only=True)
class SimResult(Generic[T]):
    """The return value of a simulated run, and figures of the run."""

    value: T
    digest: str
    """A hash over every task step: runs with equal digests were the same, step by step."""
    steps: int
    """Task steps taken."""
    seconds: float
    """Seconds that passed on the run's clock."""


def sim_run(
    async_fn: Callable[[*Args], Awaitable[T]],
    *args: *Args,
    seed: object,
    limit: float = WEEK,
    max_steps: int = 5_000_000,
    stuck_after: float = 60.0,
    virtual_time: bool = True,
    invariants: Invariants | None = None,
    instruments: Sequence[trio.abc.Instrument] = (),
) -> SimResult[T]:
    """Run ``async_fn(*args)`` in a new Trio run, with the order of its tasks drawn from ``seed``.

    Call it outside Trio, in a plain ``def test_...()``. Time is virtual: as soon as every task waits, the clock jumps to the
    next deadline; ``virtual_time=False`` allows real sockets and threads.

    Raises:
      SimDeadlock: no task could ever run again (not found without virtual time).
      SimTimeout, SimLivelock: the run would have gone beyond ``limit`` seconds of its clock, or ``max_steps`` task steps.
      SimStalled: a single step did not end within one to two times ``stuck_after`` seconds of wall-clock time.
      InvariantBroken: one of ``invariants`` did not hold between two steps.
      SystemTaskLeft, InstrumentDropped: a system task still ran at the end; one of ``instruments`` had raised.
      BaseException: an exception of ``async_fn`` comes out as itself, with a note that names the seed.
    """
    guard = RunGuard(limit=limit, max_steps=max_steps, virtual_time=virtual_time, invariants=invariants)
    watching = (guard.trace, guard, *instruments)
    clock = trio.testing.MockClock(autojump_threshold=0) if virtual_time else None
    outcome: tuple[T, float] | None = None
    error: BaseException | None = None
    try:
        with seeded_scheduler(seed), stall_watch(guard, stuck_after=stuck_after):
            outcome = trio.run(_main, async_fn, args, guard, watching, clock=clock, instruments=watching)
    except BaseException as raised:  # ruff: ignore[blind-except]  # noqa: ASYNC103 - raised right below, unless there is a verdict
        error = raised
    steps = guard.trace.steps
    if outcome is None or guard.verdict is not None:
        _raise(guard.verdict, error, f"sim_run: seed {seed!r}, {steps} steps")
    return SimResult(value=outcome[0], digest=guard.trace.digest, steps=steps, seconds=outcome[1])


def _raise(verdict: BaseException | None, error: BaseException | None, note: str) -> NoReturn:
    if verdict is not None:
        verdict.add_note(note)
        raise verdict from verdict.__cause__ or error
    if error is None:
        raise AssertionError("the run ended without a value, an error or a verdict")
    error.add_note(note)
    raise error


async def _main(
    async_fn: Callable[[*Args], Awaitable[T]],
    args: tuple[*Args],
    guard: RunGuard,
    watching: Sequence[trio.abc.Instrument],
) -> tuple[T, float] | None:
    trio.lowlevel.current_task().name = "main"
    started = trio.current_time()
    guard.begin()
    with guard.scope:
        value = await async_fn(*args)
        if guard.verdict is None:
            _require_no_system_tasks()
            _require_still_watching(watching)
        return value, trio.current_time() - started
    return None


def _require_still_watching(instruments: Sequence[trio.abc.Instrument]) -> None:
    for instrument in instruments:
        try:
            trio.lowlevel.remove_instrument(instrument)
        except KeyError:
            raise InstrumentDropped(f"{instrument!r} raised and was dropped by Trio; the log has its error") from None


def _require_no_system_tasks() -> None:
    root, main = trio.lowlevel.current_root_task(), trio.lowlevel.current_task()
    nurseries = [] if root is None else root.child_nurseries
    left = [task.name for task in _user_tasks() if task is not main and task.parent_nursery in nurseries]
    if left:
        raise SystemTaskLeft(f"system tasks still run at the end: {sorted(left)}\n{task_tree()}")
