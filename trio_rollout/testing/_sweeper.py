"""What both sweeps share: run a scenario once for each point, judge it, and never let one point end the sweep."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, final

import attrs
import trio

from ._invariants import Invariants
from ._points import Point, PointFailure, Sweep
from ._simrun import sim_run

S = TypeVar("S")


class Notes(Generic[S]):
    """What a scenario can tell the sweep while it runs."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.invariants: Invariants = Invariants()
        """What holds between any two steps of this run: ``with arm.invariants.hold(check): ...``."""
        self._kept: list[S] = []

    def sometimes(self, name: str, happened: object = True) -> None:  # ruff: ignore[boolean-default-value-positional-argument]
        """Count an interesting state, for ``Sweep.require``: a sweep that never met it has proved nothing about it."""
        self.seen[name] = self.seen.get(name, 0) + bool(happened)

    def keep(self, state: S) -> S:
        """Give the check this state even if a KeyboardInterrupt ends the scenario, so that it returns none."""
        self._kept.append(state)
        return state

    def kept(self) -> S:
        """What was kept last."""
        if not self._kept:
            raise AssertionError("KeyboardInterrupt ended the scenario, which had kept no state (keep(state))")
        return self._kept[-1]


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Sweeper(Generic[S]):
    """Runs, checks and counts; ``report`` says what came out."""

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
        """One seeded run; what it has seen is counted however it ends."""
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
        """One run with something injected, and its check; what goes wrong is this point's failure.

        With ``interrupts`` the run may end by a KeyboardInterrupt: it was injected.
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
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103 - pytest.fail() raises no Exception
            self._failures.append(PointFailure.of(attrs.evolve(point(), error=interrupt), error))

    def judge(self, state: S, point: Point | None) -> None:
        """Check a run's end. ``check`` raises or returns False where something is wrong."""
        if self.check(state, point) is False:
            raise AssertionError("the check returned False")

    def _require_reached(self, point: Point) -> None:
        if self.virtual_time and not point.where:
            raise AssertionError("the run never came to this point: it depends on something else than the seed")

    def report(self) -> Sweep:
        """All that was found."""
        return Sweep(
            points=self._points,
            failures=tuple(self._failures),
            seconds=time.perf_counter() - self._started,
            sometimes=self._sometimes,
            seed=self.seed,
        )


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is a KeyboardInterrupt, or a group with nothing but such."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_interrupt(inner) for inner in error.exceptions)
    return isinstance(error, KeyboardInterrupt)
