"""Invariants: conditions that hold between any two steps of a run.

Trio drops an instrument that raises, and goes on: an ``assert`` in an instrument checks nothing after its first failure, and
fails no test. Here the first failure stops the run and comes out of it.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import final

import attrs

from .._core.statistics import EngineStatistics


def is_conserved(counts: EngineStatistics) -> bool:
    """Return True if every pulled group is in exactly one state. ``SimWorld.open_engine`` checks that at every step."""
    return counts.pulled == (
        counts.waiting
        + counts.running
        + counts.ready
        + counts.delivered
        + counts.acked
        + counts.filtered
        + counts.quarantined
        + counts.returned
    )


@final
@attrs.define(eq=False, repr=False)
class Invariants:
    """Checks that hold while their ``with`` block is open. Give it to ``sim_run(..., invariants=...)``."""

    checked: int = attrs.field(default=0, init=False)
    """The number of checks made: an invariant that was never checked has proved nothing."""
    _checks: dict[object, tuple[str, Callable[[], object]]] = attrs.field(factory=dict, init=False)

    @contextmanager
    def hold(self, check: Callable[[], object], name: str = "") -> Generator[None]:
        """Check before every task step, until the block is left. ``check`` raises or returns False if the invariant is broken."""
        key = object()
        self._checks[key] = (name or getattr(check, "__name__", "invariant"), check)
        try:
            yield
        finally:
            del self._checks[key]

    def broken(self) -> tuple[str, BaseException] | None:
        """Make every check, and return the name and the error of the first one that fails, or None."""
        for name, check in self._checks.values():
            self.checked += 1
            try:
                answer = check()
            except Exception as error:  # ruff: ignore[blind-except]  any error means that it does not hold
                return name, error
            if answer is False:
                return name, AssertionError(f"{name} returned False")
        return None
