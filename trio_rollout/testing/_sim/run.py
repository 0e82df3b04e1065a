"""Runs one async function under a seeded scheduler and a virtual clock: the same seed, the same interleaving.

A run that depends on its seed alone is repeated exactly, in another process too. So take random numbers from a seeded
``random.Random``, do not iterate over sets, and keep real sockets and threads out.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NoReturn, TypeVar, TypeVarTuple, final

import attrs
import trio
import trio.testing

from ...observe._tree import task_tree
from .._invariants import Invariants
from .guard import InstrumentDropped, RunGuard, SystemTaskLeft, stall_watch
from .scheduler import seeded_scheduler

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
    root = trio.lowlevel.current_root_task()
    nurseries = [] if root is None else root.child_nurseries
    main = trio.lowlevel.current_task()
    left = [
        task.name
        for nursery in nurseries
        for task in nursery.child_tasks
        if task is not main and not task.name.startswith("<TrioToken")
    ]
    if left:
        raise SystemTaskLeft(f"system tasks still run at the end: {sorted(left)}\n{task_tree()}")
