"""The common part of both sweeps: run a scenario once for each point and judge it; no point ends the sweep.

``Sweeper`` runs and counts. ``Injector`` is the instrument that cancels or interrupts one run before its k-th task step after a
scope was armed.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, final

import attrs
import trio

from ..._core.failures import leaves_of
from ...observe._frames import where
from .._invariants import Invariants
from .._points import Inject, Point, PointFailure, Sweep
from .._sim import scheduler
from .._sim.run import sim_run

S = TypeVar("S")


class Notes(Generic[S]):
    """The notes that a scenario makes for the sweep while it runs."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.invariants: Invariants = Invariants()
        """The invariants of this run: ``with arm.invariants.hold(check): ...``."""
        self._kept: list[S] = []

    def sometimes(self, name: str, happened: object = True) -> None:  # ruff: ignore[boolean-default-value-positional-argument]
        """Count an interesting state, for ``Sweep.require``: a sweep that never met it has proved nothing about it."""
        self.seen[name] = self.seen.get(name, 0) + bool(happened)

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

    check: Callable[[S, Point | None], object]
    seed: object
    limit: float
    max_steps: int
    virtual_time: bool
    _points: int = attrs.field(default=0, init=False)
    _failures: list[PointFailure] = attrs.field(factory=list, init=False)
    _sometimes: dict[str, int] = attrs.field(factory=dict, init=False)
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
            for name, count in notes.seen.items():
                self._sometimes[name] = self._sometimes.get(name, 0) + count

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
                if not interrupts or not _is_interrupt(error):
                    raise
                state, interrupt = notes.kept(), error
            self._require_reached(point())
            self.judge(state, attrs.evolve(point(), error=interrupt))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103 - pytest.fail() raises no Exception
            self._failures.append(PointFailure.of(attrs.evolve(point(), error=interrupt), error))

    def judge(self, state: S, point: Point | None) -> None:
        """Check the end of a run. ``check`` raises or returns False if something is wrong."""
        if self.check(state, point) is False:
            raise AssertionError("the check returned False")

    def _require_reached(self, point: Point) -> None:
        if self.virtual_time and not point.where:
            raise AssertionError("the run never reached this point: it depends on more than the seed")

    def report(self) -> Sweep:
        """Return the result of the sweep."""
        return Sweep(
            points=self._points,
            failures=tuple(self._failures),
            seconds=time.perf_counter() - self._started,
            sometimes=self._sometimes,
            seed=self.seed,
        )


def _is_interrupt(error: BaseException) -> bool:
    """Return True for a KeyboardInterrupt, and for a group of nothing else."""
    return all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves_of(error))


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
