"""Exceptions as values: type, message and traceback, safe to keep and to write down.

What follows a failed attempt: another try, or the end. Pure decisions.
"""

import traceback
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from .enums import Cause
from .settings import Retry
from .values import Failure, GroupId

_LONGEST = 16_384
"""Characters of a text. A failure is kept as long as its run, written down and logged; an exception may quote a whole dialogue."""


def failure_of(
    error: BaseException, cause: Cause = Cause.ERROR, *, group: GroupId | None = None, attempt: int | None = None
) -> Failure:
    """Describe an exception. Holds no reference to it, its frames or anything in them. Of a group every leaf is named."""
    return Failure(
        cause=cause,
        type=type(error).__qualname__,
        message=_shortened(words_of(error)),
        traceback=_shortened(_traceback_of(error)),
        group=group,
        attempt=attempt,
    )


def words_of(error: BaseException) -> str:
    """What an exception says, whatever its ``__str__`` does; of a group, what each leaf says."""
    try:
        words = str(error)
    except Exception as another:  # noqa: BLE001  the user's __str__
        words = f"(its text can't be had: __str__ raised {type(another).__name__})"
    if isinstance(error, BaseExceptionGroup):
        return "; ".join([words, *(f"{type(leaf).__name__}: {words_of(leaf)}" for leaf in leaves_of(error))])
    return words


def leaves_of(error: BaseException) -> Sequence[BaseException]:
    """The exceptions in a group, at any depth; the exception itself if it is none."""
    if not isinstance(error, BaseExceptionGroup):
        return (error,)
    return [leaf for inner in error.exceptions for leaf in leaves_of(inner)]


def _shortened(text: str) -> str:
    """Its beginning and its end, if it is too long: the end of a traceback says what was raised."""
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[{left_out} characters are left out]\n{text[-half:]}"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  the user's __str__, or __notes__
        return "".join(traceback.format_tb(error.__traceback__))


@attrs.frozen(kw_only=True)
class Again:
    """Requeue it. ``attempts`` and ``unpenalized`` are the counts after this one; ``backoff`` numbers the wait, 0 for none."""

    attempts: int
    unpenalized: int
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


def after_failure(
    cause: Cause, *, permanent: bool, attempts: int, unpenalized: int, new_tokens: int, retry: Retry
) -> Verdict:
    """Decide on a group whose attempt just ended without a result.

    ``attempts`` and ``unpenalized`` are the counts before it; ``permanent`` means that no other try can end differently (bad
    input); ``new_tokens`` is what this attempt sampled: such a cause counts only when that is nothing.
    """
    if permanent:
        return GiveUp(why="trying again cannot help")
    if cause.uses_attempt:
        attempts += 1
        if attempts >= retry.max_attempts:
            return GiveUp(why=f"attempt {attempts} of at most {retry.max_attempts}")
        return Again(attempts=attempts, unpenalized=0, backoff=attempts)
    unpenalized = 0 if new_tokens else unpenalized + 1
    if unpenalized > retry.max_free:
        return GiveUp(
            why=f"requeued {unpenalized} times in a row without a new token, at most {retry.max_free} are allowed"
        )
    return Again(attempts=attempts, unpenalized=unpenalized, backoff=0 if cause in _NO_WAIT else min(unpenalized, 8))


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
