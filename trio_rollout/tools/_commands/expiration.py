"""Which stop a captured command met: a pure decision, so that races are decided by rule and not by the scheduler."""

import enum
import math
from collections.abc import Sequence

import attrs
import trio


class StopKind(enum.Enum):
    """What ended a captured command."""

    EXITED = "exited"
    """It ended by itself; it may have been killed by a signal that was not ours."""
    TIMED_OUT = "timed_out"
    """It ran into its time limit: its group was killed at once. Exit code 124."""
    CANCELLED = "cancelled"
    """A cancel event was set: SIGTERM, a short grace, SIGKILL. Exit code 1."""


def as_seconds(asked: float | None) -> float | None:
    """A time that somebody asks for, checked before anything is started: NaN would be neither over nor not over.

    Raises:
      ValueError: it is NaN.

    """
    if asked is not None and math.isnan(asked):
        raise ValueError(f"seconds: got {asked!r}, allowed: a number, or None where that means no limit")
    return asked


@attrs.frozen(kw_only=True)
class Expiration:
    """When a captured command has to end: ``timeout`` seconds after its start (None: never), and in any case at ``until``
    on Trio's clock; or when any of ``cancels`` is set.

    Raises:
      ValueError: ``timeout`` is NaN.

    """

    timeout: float | None = attrs.field(default=None, converter=as_seconds)
    until: float = math.inf
    cancels: tuple[trio.Event, ...] = ()

    def with_cancellation(self, *events: trio.Event) -> "Expiration":
        """The same limit, with more events that cancel."""
        return attrs.evolve(self, cancels=self.cancels + events)

    def classify(self, *, exited: bool) -> StopKind:
        """What it was, at a moment when something of it is due.

        An observed exit is kept whatever else is due (a clean exit stays one); a cancellation beats a timeout that is
        due at the same instant. A scope's ``cancelled_caught`` must not decide it: it can be true with the event set.
        """
        if exited:
            return StopKind.EXITED
        return StopKind.CANCELLED if any(event.is_set() for event in self.cancels) else StopKind.TIMED_OUT

    def deadline(self, now: float) -> float:
        """When the time is over, on Trio's clock, for a command that starts now."""
        return min(self.until, math.inf if self.timeout is None else now + max(0.0, self.timeout))


def as_events(cancel: trio.Event | Sequence[trio.Event]) -> tuple[trio.Event, ...]:
    """One event, or several of which any counts."""
    return (cancel,) if isinstance(cancel, trio.Event) else tuple(cancel)
