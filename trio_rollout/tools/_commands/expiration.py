"""The end of a captured command's time, and the stop that it met.

The stop is a pure decision, so that a race is settled by rule and not by the scheduler.
"""

import enum
import math
from collections.abc import Sequence

import attrs
import trio


class StopKind(enum.Enum):
    """The stop that a captured command met."""

    EXITED = "exited"
    """The command exited by itself; a signal that we did not send may have killed it."""
    TIMED_OUT = "timed_out"
    """The command reached its time limit and its group was killed at once. Exit code 124."""
    CANCELLED = "cancelled"
    """A cancel event was set: SIGTERM, a short grace, SIGKILL. Exit code 1."""


def as_seconds(asked: float | None) -> float | None:
    """Return a requested time unchanged, after a check for NaN, which would be neither over nor not over.

    Raises:
      ValueError: the time is NaN.

    """
    if asked is not None and math.isnan(asked):
        raise ValueError(f"seconds: got {asked!r}, allowed: a number, or None where that means no limit")
    return asked


@attrs.frozen(kw_only=True)
class Expiration:
    """The limits of a captured command: ``timeout`` seconds after its start (None: no limit), the time ``until`` on Trio's
    clock, and ``cancels``, of which any event that is set cancels the command.

    Raises:
      ValueError: ``timeout`` is NaN.

    """

    timeout: float | None = attrs.field(default=None, converter=as_seconds)
    until: float = math.inf
    cancels: tuple[trio.Event, ...] = ()

    def classify(self, *, exited: bool) -> StopKind:
        """Return the stop that was met, at a moment when at least one is due.

        An observed exit is kept, whatever else is due. A cancellation wins over a timeout that is due at the same instant.
        A scope's ``cancelled_caught`` must not decide: it can be true although the event is set.
        """
        if exited:
            return StopKind.EXITED
        return StopKind.CANCELLED if any(event.is_set() for event in self.cancels) else StopKind.TIMED_OUT

    def deadline(self, now: float) -> float:
        """Return the deadline on Trio's clock for a command that starts now."""
        return min(self.until, math.inf if self.timeout is None else now + max(0.0, self.timeout))


def as_events(cancel: trio.Event | Sequence[trio.Event]) -> tuple[trio.Event, ...]:
    """Return one event, or a sequence of events, as a tuple."""
    return (cancel,) if isinstance(cancel, trio.Event) else tuple(cancel)
