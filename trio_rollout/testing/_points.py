"""The results of a sweep: the points at which something was injected, and the points after which a check failed."""

import enum
import traceback
from collections.abc import Mapping
from typing import final

import attrs

_MOST_SHOWN = 20


class Inject(enum.Enum):
    """The kinds of injection."""

    CANCEL = "cancel"
    """An armed scope is cancelled before the step."""
    CANCEL_TWICE = "cancel twice"
    """One armed scope is cancelled before the step, another one some steps later, while the first is being left."""
    INTERRUPT = "interrupt"
    """Ctrl-C while Trio or protected code runs: the main task gets KeyboardInterrupt at its next checkpoint."""
    THROW = "throw"
    """An exception is raised at one await of a user's callback."""
    SEED = "seed"
    """Only the order of tasks and the world's randomness: one run of a seed."""


@final
@attrs.frozen(kw_only=True)
class Point:
    """One injection into one run."""

    how: Inject
    step: int
    """The number of the step (or await), counted from 1 since the scope was armed; for SEED the seed."""
    scope: str = ""
    """The name of the scope that was cancelled; for CANCEL_TWICE both names, with the steps between them."""
    where: str = ""
    """``task @ function:line`` of the code that was about to run."""
    error: BaseException | None = attrs.field(default=None, eq=False)
    """The KeyboardInterrupt that ended the scenario, if one did."""

    def __str__(self) -> str:
        scope = f" {self.scope}" if self.scope else ""
        at = "" if self.how is Inject.SEED else " at await" if self.how is Inject.THROW else " at step"
        return f"{self.how.value}{scope}{at} {self.step}: {self.where or 'never reached'}"


@final
@attrs.frozen(kw_only=True)
class PointFailure:
    """A point after which the check, or the scenario itself, failed."""

    point: Point
    error: str
    traceback: str = attrs.field(repr=False)

    @classmethod
    def of(cls, point: Point, error: BaseException) -> "PointFailure":
        """Make a failure of an error, as text: its frames would keep everything of the run alive."""
        return cls(
            point=point,
            error=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )


@final
@attrs.frozen(kw_only=True)
class Sweep:
    """The result of a sweep over all points of one scenario."""

    points: int
    """The number of runs with an injection."""
    failures: tuple[PointFailure, ...]
    seconds: float
    """Wall-clock seconds that the sweep took."""
    sometimes: Mapping[str, int]
    """The number of times that the scenario reported each interesting state, over all runs."""
    seed: object

    def __str__(self) -> str:
        head = f"{len(self.failures)} of {self.points} points failed (seed {self.seed!r}, {self.seconds:.1f} s)"
        shown = [
            f"  {failure.point}\n    {failure.error.splitlines()[0][:200]}" for failure in self.failures[:_MOST_SHOWN]
        ]
        more = [f"  ... and {len(self.failures) - _MOST_SHOWN} more"] if len(self.failures) > _MOST_SHOWN else []
        return "\n".join([head, *shown, *more])

    def require(self, *interesting: str, at_least: int = 1) -> "Sweep":
        """Insist that no point failed and that each of these states was seen, and return the sweep.

        A sweep that never met the state it is about has proved nothing.

        Raises:
          AssertionError: lists the failed points with the first one's traceback, or the states never seen.
        """
        if self.failures:
            raise AssertionError(f"{self}\n\nthe first of them:\n{self.failures[0].traceback}")
        if self.points == 0:
            raise AssertionError("the sweep had no point: no scope was armed, or no callback was called")
        unseen = [name for name in interesting if self.sometimes.get(name, 0) < at_least]
        if unseen:
            raise AssertionError(f"never in an interesting state: {unseen}; seen were {dict(self.sometimes)}")
        return self
