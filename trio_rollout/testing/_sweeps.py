"""Faults at every point: ``cancel_everywhere`` and ``throw_everywhere`` run a scenario once for each point, and judge the end.

No point ends the sweep. ``Sweeper`` runs and counts. ``Injector`` is the instrument that cancels or interrupts one run before its
k-th task step after a scope was armed. ``Faults`` raises in a user's callback, when it starts and at each await in place of its
result, also while the callback is being cancelled.

The points are exhaustive for one order of the tasks and one course of events only. So vary ``seed``, and write scenarios with
slow consumers, full buffers and faults: of three bugs planted in a toy pool, one is found with a slow consumer only. A
point costs 1 to 5 ms, and there are as many points as steps: ``sample`` draws that many of them.
"""

import functools
import operator
import random
import time
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, final

import attrs
import trio

from .._core.failures import leaves_of
from ..observe._frames import frame_label, where
from ._invariants import Invariants
from ._points import Inject, Point, PointFailure, Sweep
from ._sim import scheduler
from ._sim.run import sim_run

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")

Check: TypeAlias = Callable[[S, Point | None], object]
Raises: TypeAlias = Callable[[str], BaseException]
"""An exception class, or a function that makes the exception from a message."""

_LONGEST_BETWEEN = 8  # steps between the two cancellations of CANCEL_TWICE: most clean-ups take fewer


class Notes(Generic[S]):
    """The notes that a scenario makes for the sweep while it runs."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.invariants: Invariants = Invariants()
        """The invariants of this run: ``with arm.invariants.hold(check): ...``."""
        self._kept: list[S] = []

    def sometimes(self, name: str, happened: object = True) -> None:  # ruff: ignore[boolean-default-value-positional-argument]
        """Count an interesting state, for ``Sweep.require``: a sweep that never met it has proved nothing about it."""
        self.seen[name] += bool(happened)

    def keep(self, state: S) -> S:
        """Keep a state for the check, in case that a KeyboardInterrupt ends the scenario before it returns one."""
        self._kept.append(state)
        return state

    def kept(self) -> S:
        """Return the state that was kept last."""
        if not self._kept:
            raise AssertionError("KeyboardInterrupt ended the scenario, which had kept no state (keep(state))")
        return self._kept[-1]


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Sweeper(Generic[S]):
    """Runs, checks and counts; ``report`` returns the result."""

    check: Check[S]
    seed: object
    limit: float
    max_steps: int
    virtual_time: bool
    _points: int = attrs.field(default=0, init=False)
    _failures: list[PointFailure] = attrs.field(factory=list, init=False)
    _sometimes: Counter[str] = attrs.field(factory=Counter, init=False)
    _started: float = attrs.field(factory=time.perf_counter, init=False)

    def once(
        self, main: Callable[[], Awaitable[S]], notes: Notes[S], instruments: Sequence[trio.abc.Instrument] = ()
    ) -> S:
        """Make one seeded run; the states that it has seen count however it ends."""
        try:
            return sim_run(
                main,
                seed=self.seed,
                limit=self.limit,
                max_steps=self.max_steps,
                virtual_time=self.virtual_time,
                invariants=notes.invariants,
                instruments=instruments,
            ).value
        finally:
            self._sometimes.update(notes.seen)

    def attempt(self, run: Callable[[], S], point: Callable[[], Point], notes: Notes[S], *, interrupts: bool) -> None:
        """Make one run with an injection, and check it; any error is this point's failure.

        With ``interrupts`` the run may end by the KeyboardInterrupt that was injected.
        """
        self._points += 1
        interrupt: BaseException | None = None
        try:
            try:
                state = run()
            except BaseException as error:  # noqa: ASYNC103 - of a whole Trio run, outside of any
                if not interrupts or not all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves_of(error)):
                    raise
                state, interrupt = notes.kept(), error
            self.judge(state, attrs.evolve(point(), error=interrupt))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103 - pytest.fail() raises no Exception
            self._failures.append(PointFailure.of(attrs.evolve(point(), error=interrupt), error))

    def judge(self, state: S, point: Point | None) -> None:
        """Check the end of a run. ``check`` raises or returns False if something is wrong."""
        if point is not None and self.virtual_time and not point.where:
            raise AssertionError("the run never reached this point: it depends on more than the seed")
        if self.check(state, point) is False:
            raise AssertionError("the check returned False")

    def report(self) -> Sweep:
        """Return the result of the sweep."""
        return Sweep(
            points=self._points,
            failures=tuple(self._failures),
            seconds=time.perf_counter() - self._started,
            sometimes=self._sometimes,
            seed=self.seed,
        )


@final
@attrs.define(eq=False)
class Armed:
    """One armed scope: the step at which it was armed, and once it is over, the number of steps that it lived."""

    scope: trio.CancelScope
    since: int
    steps: int | None = None


@final
@attrs.frozen(kw_only=True)
class Injection:
    """One injection: ``how``, before the ``step``-th step of scope ``name``; ``then``: cancel another scope, steps later."""

    how: Inject
    name: str
    step: int
    then: tuple[str, int] | None = None

    @property
    def label(self) -> str:
        """The scopes, for the report."""
        return self.name if self.then is None else f"{self.name}, {self.then[1]} steps later {self.then[0]}"


@final
class Arm(Notes[S]):
    """The scenario's argument: it arms the scopes that are to be cancelled, and takes notes."""

    def __init__(self, arm: Callable[[trio.CancelScope, str], None]) -> None:
        super().__init__()
        self._arm = arm

    def __call__(self, scope: trio.CancelScope, name: str = "scope") -> None:
        """Arm ``scope``: each run cancels it before another one of the following steps.

        A name that is used again in the same run is numbered: ``name``, ``name#2``, ...
        """
        self._arm(scope, name)


@final
class Injector(trio.abc.Instrument):
    """Counts the steps since each scope was armed, and carries out one injection, if it has one."""

    def __init__(self, injection: Injection | None = None) -> None:
        self.armed: dict[str, Armed] = {}
        self.where = ""
        self._injection = injection
        self._steps = 0
        self._second_at: int | None = None

    def arm(self, scope: trio.CancelScope, name: str) -> None:
        """Start counting for this scope."""
        used = sum(known == name or known.startswith(f"{name}#") for known in self.armed)
        self.armed[name if not used else f"{name}#{used + 1}"] = Armed(scope, self._steps)

    def lives(self) -> dict[str, int]:
        """Return the number of steps that each armed scope lived; called after the run."""
        return {
            name: self._steps - armed.since if armed.steps is None else armed.steps
            for name, armed in self.armed.items()
        }

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count the step, and inject if it is the planned one."""
        if not self.armed:
            return
        self._steps += 1
        injection = self._injection
        if injection is None:
            self._note_ends()
        elif self._steps == self._second_at and injection.then is not None:
            self._cancel(injection.then[0])
        elif (
            not self.where and (armed := self.armed.get(injection.name)) and self._steps - armed.since == injection.step
        ):
            self.where = where(task)
            self._inject(injection)

    def _note_ends(self) -> None:
        for armed in self.armed.values():
            if armed.steps is None and scheduler.scope_is_over(armed.scope):
                armed.steps = self._steps - 1 - armed.since

    def _inject(self, injection: Injection) -> None:
        if injection.how is Inject.INTERRUPT:
            scheduler.interrupt()
        else:
            self._cancel(injection.name)
            if injection.then is not None:
                self._second_at = self._steps + injection.then[1]

    def _cancel(self, name: str) -> None:
        if name in self.armed:
            self.armed[name].scope.cancel(reason=f"cancel_everywhere, {name}")


def cancel_everywhere(
    scenario: Callable[[Arm[S]], Awaitable[S]],
    check: Check[S],
    *,
    seed: object = 0,
    how: Collection[Inject] = (Inject.CANCEL,),
    scopes: Collection[str] | None = None,
    sample: int | None = None,
    limit: float = 86400.0,
    max_steps: int = 200_000,
    virtual_time: bool = True,
) -> Sweep:
    """Run ``scenario`` undisturbed, then once for each point at which it could be cancelled; check the end of each run.

    ``scenario(arm)`` calls ``arm(scope)`` with a cancel scope that it has made (several by name: ``arm(scope, "turn")``), does
    the work in it and returns a state, even if that scope was cancelled. ``check(state, point)`` raises, or returns
    False, if something is lost; ``point`` is None for the undisturbed run, which must succeed. Interrupted by Ctrl-C, the
    scenario may end by KeyboardInterrupt; the check then gets the state that ``arm.keep(state)`` was given. ``scopes``: those
    to cancel, by default all. An exception at a point is that point's failure. Scenarios with real sockets or threads need
    ``virtual_time=False``; a step may then be missed.

    Raises:
      BaseException: the error of the undisturbed run, or of its check.
      ValueError: no scope was armed, or none of those named.
    """
    sweeper = Sweeper(check=check, seed=seed, limit=limit, max_steps=max_steps, virtual_time=virtual_time)
    run, arm, injector = _armed(sweeper, scenario, None)
    sweeper.judge(run(), None)
    lives = injector.lives()
    wanted = {name: steps for name, steps in lives.items() if scopes is None or name in scopes}
    if not wanted:
        raise ValueError(f"cancel_everywhere: armed were {sorted(lives)}, to be cancelled {scopes}: nothing to do")
    draw = random.Random(f"cancel_everywhere-{seed}")
    for kind in how:
        for injection in _sampled(list(_injections(kind, wanted, draw)), sample, draw):
            run, arm, injector = _armed(sweeper, scenario, injection)
            point = Point(how=kind, step=injection.step, scope=injection.label)
            sweeper.attempt(run, _reached(point, injector), arm, interrupts=kind is Inject.INTERRUPT)
    return sweeper.report()


def _armed(
    sweeper: Sweeper[S], scenario: Callable[[Arm[S]], Awaitable[S]], injection: Injection | None
) -> tuple[Callable[[], S], Arm[S], Injector]:
    """Return a function that makes one run of the scenario with the injection, with its notes and its injector."""
    injector = Injector(injection)
    arm: Arm[S] = Arm(injector.arm)
    return lambda: sweeper.once(lambda: scenario(arm), arm, (injector,)), arm, injector


def _reached(point: Point, injected: "Injector | Faults[Any]") -> Callable[[], Point]:
    """Return a function that completes the point by the place where it was reached."""
    return lambda: attrs.evolve(point, where=injected.where)


def _sampled(points: Sequence[T], sample: int | None, draw: random.Random) -> Sequence[T]:
    return points if sample is None or sample >= len(points) else draw.sample(points, sample)


def _injections(how: Inject, lives: dict[str, int], draw: random.Random) -> Iterator[Injection]:
    if how in {Inject.THROW, Inject.SEED}:
        raise ValueError(f"cancel_everywhere only cancels and interrupts, it does not know {how}")
    if how is Inject.CANCEL_TWICE and len(lives) == 1:
        raise ValueError(f"cancel_everywhere: cancelling twice needs two armed scopes, there is only {list(lives)}")
    if how is Inject.INTERRUPT:  # a signal has no scope: the one that lives longest is used
        lives = dict([max(lives.items(), key=operator.itemgetter(1))])
    for name, steps in lives.items():
        others = [other for other in lives if other != name]
        for step in range(1, steps + 1):
            twice = how is Inject.CANCEL_TWICE
            then = (draw.choice(others), draw.randint(1, _LONGEST_BETWEEN)) if twice else None
            yield Injection(how=how, name=name, step=step, then=then)


@final
class Faults(Notes[S]):
    """The scenario's argument: ``faults(fn)`` is the user's function with the fault in it."""

    def __init__(self, make: Raises, *, at: int) -> None:
        super().__init__()
        self.awaits: int = 0
        self.where: str = ""
        self._make = make
        self._at = at

    def __call__(self, async_fn: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Return ``async_fn`` with the fault: it may be raised when it starts, and at each of its awaits."""
        name = getattr(async_fn, "__name__", type(async_fn).__name__)

        @functools.wraps(async_fn, updated=())
        async def faulty(*args: P.args, **kwargs: P.kwargs) -> T:
            self.step(name)
            return await _driven(
                _as_coroutine(async_fn(*args, **kwargs)), lambda coro: self.step(f"{name} @ {_line(coro)}")
            )

        return faulty

    def step(self, where: str) -> None:
        """Count one await, and raise if it is the planned one."""
        self.awaits += 1
        if self.awaits == self._at:
            self.where = where
            raise self._make(f"injected at await {self._at}: {where}")


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _line(coro: Coroutine[Any, Any, Any]) -> str:
    """Return the callback's position: its innermost frame that is neither Trio's nor this file's."""
    inner: Any = coro
    label = "its start"
    while inner is not None:
        frame = getattr(inner, "cr_frame", None)
        if frame is not None and "/trio/" not in frame.f_code.co_filename and frame.f_code.co_filename != __file__:
            label = frame_label(frame, frame.f_lineno)
        inner = getattr(inner, "cr_await", None)
    return label


@types.coroutine
def _driven(
    coro: Coroutine[Any, Any, T], before_resume: Callable[[Coroutine[Any, Any, T]], None]
) -> Generator[Any, Any, T]:
    """Run ``coro`` by hand, so that an exception can replace the result of an await."""
    resume: Callable[[Any], Any] = coro.send
    value: Any = None
    while True:
        try:
            trap = resume(value)
        except StopIteration as stop:
            result: T = stop.value
            return result  # ruff: ignore[return-in-generator]  a generator-based coroutine returns like any other
        try:
            resume, value = coro.send, (yield trap)
            before_resume(coro)
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103 - every exception is the callback's
            resume, value = coro.throw, error


def throw_everywhere(
    scenario: Callable[[Faults[S]], Awaitable[S]],
    check: Check[S],
    *,
    exc: Raises = RuntimeError,
    seed: object = 0,
    sample: int | None = None,
    limit: float = 86400.0,
    max_steps: int = 200_000,
    virtual_time: bool = True,
) -> Sweep:
    """Run ``scenario`` undisturbed, then once for each await of its user callbacks with an exception raised there.

    ``scenario(faults)`` passes ``faults(fn)`` to the code under test in place of the user's ``fn``, and returns a state.
    ``check(state, point)`` raises, or returns False, if the exception was lost: it must have become a recorded failure or
    another try. ``exc`` is the exception's class, of any kind, or makes the exception from a message. An exception at a
    point, of the scenario or of the check, is that point's failure, a SystemExit too. With ``exc=KeyboardInterrupt`` it is
    Ctrl-C while the user's code runs: the scenario may then end by it, and the check gets the state that ``faults.keep(state)``
    was given.

    Raises:
      BaseException: the error of the undisturbed run, or of its check.
    """
    sweeper = Sweeper(check=check, seed=seed, limit=limit, max_steps=max_steps, virtual_time=virtual_time)

    def run(faults: Faults[S]) -> S:
        return sweeper.once(lambda: scenario(faults), faults)

    counting: Faults[S] = Faults(exc, at=0)
    sweeper.judge(run(counting), None)
    for at in _sampled(range(1, counting.awaits + 1), sample, random.Random(f"throw_everywhere-{seed}")):
        faults: Faults[S] = Faults(exc, at=at)
        point = Point(how=Inject.THROW, step=at)
        sweeper.attempt(functools.partial(run, faults), _reached(point, faults), faults, interrupts=True)
    return sweeper.report()
