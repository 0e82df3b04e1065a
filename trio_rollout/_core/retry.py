"""What follows a failed attempt: another try, or the end. Pure decisions."""

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from .enums import Cause
from .settings import Retry


@attrs.frozen(kw_only=True)
class Again:
    """Requeue it. ``attempts`` and ``free`` are the counts after this one; ``backoff`` numbers the wait, 0 for none."""

    attempts: int
    free: int
    backoff: int


@attrs.frozen(kw_only=True)
class GiveUp:
    """Quarantine it."""

    why: str


Verdict: TypeAlias = Again | GiveUp

# Causes that nobody needs to wait out: the gate, the choice of a server or the drain already does.
_NO_WAIT: Mapping[Cause, bool] = {
    Cause.WEIGHT_UPDATE: True,
    Cause.STALE: True,
    Cause.SHUTDOWN: True,
    Cause.CANCELLED: True,
}


def after_failure(cause: Cause, *, hopeless: bool, attempts: int, free: int, new_tokens: int, retry: Retry) -> Verdict:
    """Decide on a group whose attempt just ended without a result.

    ``attempts`` and ``free`` are the counts before it; ``hopeless`` means that no other try can end differently (bad
    input); ``new_tokens`` is what this attempt sampled: a free cause counts only when that is nothing.
    """
    if hopeless:
        return GiveUp(why="trying again cannot help")
    if cause.uses_attempt:
        attempts += 1
        if attempts >= retry.max_attempts:
            return GiveUp(why=f"attempt {attempts} of at most {retry.max_attempts}")
        return Again(attempts=attempts, free=0, backoff=attempts)
    free = 0 if new_tokens else free + 1
    if free > retry.max_free:
        return GiveUp(why=f"requeued {free} times in a row without a new token, at most {retry.max_free} are allowed")
    return Again(attempts=attempts, free=free, backoff=0 if cause in _NO_WAIT else min(free, 8))


@attrs.define(eq=False)
class FailureBudget:
    """Counts groups that failed for good with none becoming ready in between: that many are not bad luck."""

    limit: int
    in_a_row: int = 0

    def group_ready(self) -> None:
        """A group became ready: what failed before was not everything."""
        self.in_a_row = 0

    def group_failed(self) -> bool:
        """A group failed for good; whether the budget is now used up."""
        self.in_a_row += 1
        return self.in_a_row >= self.limit
