"""Does one thing to one run: before its k-th task step after a scope was armed, cancels or interrupts."""

from collections.abc import Callable
from typing import TypeVar, final

import attrs
import trio

from ..observe._frames import where
from . import _scheduler as scheduler
from ._points import Inject
from ._sweeper import Notes

S = TypeVar("S")


@final
@attrs.define(eq=False)
class Armed:
    """One armed scope: when it was armed, and (once it is over) for how many steps it lived."""

    scope: trio.CancelScope
    since: int
    steps: int | None = None


@final
@attrs.frozen(kw_only=True)
class Plan:
    """What to do: ``how``, before the ``step``-th step of scope ``name``; ``then``: cancel another scope, steps later."""

    how: Inject
    name: str
    step: int
    then: tuple[str, int] | None = None

    @property
    def label(self) -> str:
        """The scopes concerned, for the report."""
        return self.name if self.then is None else f"{self.name}, {self.then[1]} steps later {self.then[0]}"


@final
class Arm(Notes[S]):
    """What a scenario gets: it arms the scopes that are to be cancelled and reports what it has seen."""

    def __init__(self, arm: Callable[[trio.CancelScope, str], None]) -> None:
        super().__init__()
        self._arm = arm

    def __call__(self, scope: trio.CancelScope, name: str = "scope") -> None:
        """Arm ``scope``: each run cancels it before another one of the steps that follow.

        A name that is used again in the same run is numbered: ``name``, ``name#2``, ...
        """
        self._arm(scope, name)


@final
class Injector(trio.abc.Instrument):
    """Counts the steps since each scope was armed and carries out one plan; without a plan it only counts."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.armed: dict[str, Armed] = {}
        self.where = ""
        self._plan = plan
        self._steps = 0
        self._second_at: int | None = None

    def arm(self, scope: trio.CancelScope, name: str) -> None:
        """Start counting for this scope."""
        used = sum(known == name or known.startswith(f"{name}#") for known in self.armed)
        self.armed[name if not used else f"{name}#{used + 1}"] = Armed(scope, self._steps)

    def lives(self) -> dict[str, int]:
        """For how many steps each armed scope lived, after the run."""
        return {
            name: self._steps - armed.since if armed.steps is None else armed.steps
            for name, armed in self.armed.items()
        }

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count, and inject if this is the step."""
        if not self.armed:
            return
        self._steps += 1
        plan = self._plan
        if plan is None:
            self._note_ends()
        elif self._steps == self._second_at and plan.then is not None:
            self._cancel(plan.then[0])
        elif not self.where and (armed := self.armed.get(plan.name)) and self._steps - armed.since == plan.step:
            self.where = where(task)
            self._inject(plan)

    def _note_ends(self) -> None:
        for armed in self.armed.values():
            if armed.steps is None and scheduler.scope_is_over(armed.scope):
                armed.steps = self._steps - 1 - armed.since

    def _inject(self, plan: Plan) -> None:
        if plan.how is Inject.INTERRUPT:
            scheduler.interrupt()
        else:
            self._cancel(plan.name)
            if plan.then is not None:
                self._second_at = self._steps + plan.then[1]

    def _cancel(self, name: str) -> None:
        if name in self.armed:
            self.armed[name].scope.cancel(reason=f"cancel_everywhere, {name}")
