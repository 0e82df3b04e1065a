"""Failures that repeat, told once and then counted, and scorers that fail alike: pure decisions.

A programming error fails at every trajectory. It is logged once in full; after that a line comes only when the number of
failures has doubled, so that a run of a million rollouts logs twenty lines of it.
"""

import re
from collections import OrderedDict
from typing import Final

import attrs

from .settings import Retry
from .values import Failure

_MOST_KINDS: Final = 256
"""Kinds of failures that are told apart; the one that was met longest ago is forgotten first."""
_PLACE: Final = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


@attrs.define(eq=False)
class FailureLog:
    """Decides what is logged of each failure.

    Failures are of one kind if they come from the same kind of work, have the same type and were raised at the same place:
    their messages often name a sample, or quote its text.
    """

    _counts: OrderedDict[tuple[str, str, str], int] = attrs.field(factory=OrderedDict, init=False)

    def text_for(self, work: str, failure: Failure) -> str | None:
        """Count a failure and return what to log of it; None if it repeats and is not the 2nd, 4th, 8th, ... of its kind.

        ``work`` says what failed, such as "reward", without names of groups and samples.
        """
        place = _PLACE.findall(failure.traceback)
        kind = (work, failure.type, str(place[-1]) if place else failure.message)
        count = self._counts.pop(kind, 0) + 1
        self._counts[kind] = count
        if len(self._counts) > _MOST_KINDS:
            self._counts.popitem(last=False)
        if count == 1:
            return f"{failure}\n{failure.traceback}".rstrip()
        return f"{failure} (x {count} so far)" if count.bit_count() == 1 else None


@attrs.define(eq=False)
class ScorerTries:
    """The failed tries of one scorer at one trajectory or group."""

    _retry: Retry
    used: int = attrs.field(default=0, init=False)
    """Tries that count."""
    _free: int = attrs.field(default=0, init=False)
    _last: tuple[str, str] | None = attrs.field(default=None, init=False)

    def after(self, failure: Failure, *, counts: bool) -> int | None:
        """Count a failed try. Return the number of the backoff before the next one; None if there is no next one.

        ``counts``: it uses up one of ``Retry.max_attempts``; if not, the infrastructure failed, and ``Retry.max_free`` bounds
        such tries. A scorer that fails twice in a row with the same type and message is a program that will do it again.
        """
        if not counts:
            self._free += 1
            return min(self._free, 8) if self._free <= self._retry.max_free else None
        before, self._last = self._last, (failure.type, failure.message)
        self.used += 1
        return None if self.used >= self._retry.max_attempts or before == self._last else self.used
