"""Failures: exceptions as values, safe to keep and to write down; and the pure decision on a failed try."""

import re
import traceback
from collections.abc import Sequence
from typing import Final

import attrs

from ..errors import FailedElsewhere, InfrastructureError, ServerLost
from .enums import Cause
from .settings import Retry
from .values import Failure, GroupId

_LONGEST = 16_384
"""Characters of a text. A failure is kept as long as its run, written down and logged, and may quote a whole dialogue."""


def failure_of(
    error: BaseException, cause: Cause = Cause.ERROR, *, group: GroupId | None = None, attempt: int | None = None
) -> Failure:
    """Return an exception as a value, without references to its frames. Of an exception group every leaf is named."""
    if isinstance(error, FailedElsewhere) and error.failure is not None:
        return attrs.evolve(error.failure, cause=cause, group=group, attempt=attempt)
    return Failure(
        cause=cause,
        type=_type_of(error),
        message=_shortened(_with_advice(error)),
        traceback=_shortened(_traceback_of(error)),
        group=group,
        attempt=attempt,
    )


def words_of(error: BaseException) -> str:
    """Return an exception's text, even if its ``__str__`` raises; of an exception group, the text of each leaf."""
    try:
        words = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as another:  # noqa: BLE001, ASYNC103  the user's __str__, which may raise any class
        words = f"(its text can't be had: __str__ raised {type(another).__name__})"
    if isinstance(error, BaseExceptionGroup):
        return "; ".join([words, *(f"{type(leaf).__name__}: {words_of(leaf)}" for leaf in leaves_of(error))])
    return words


def leaves_of(error: BaseException) -> Sequence[BaseException]:
    """Return the exceptions in an exception group, at any depth; the exception itself if it is no group."""
    if not isinstance(error, BaseExceptionGroup):
        return (error,)
    return [leaf for inner in error.exceptions for leaf in leaves_of(inner)]


def classes_of(error: BaseException) -> tuple[str, ...]:
    """Return the classes of an exception as "module.Class", its own first; of an error that stands for another one, those."""
    raised: tuple[str, ...] = getattr(error, "raised", ())
    return raised or tuple(map(_name_of, type(error).__mro__))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _type_of(error: BaseException) -> str:
    raised: tuple[str, ...] = getattr(error, "raised", ())
    return raised[0].rpartition(".")[2] if raised else type(error).__qualname__


# Messages of Python and Trio that do not say what to do about them here.
_NEEDS_ASYNCIO: Final = re.compile(
    r"no (running|current) event loop|received unrecognized yield message|unknown async library", re.IGNORECASE
)
_NEEDS_MAIN_THREAD: Final = re.compile(r"only works in (the )?main thread", re.IGNORECASE)


def _with_advice(error: BaseException) -> str:
    words = words_of(error)
    if not any(isinstance(leaf, RuntimeError | TypeError | ValueError) for leaf in leaves_of(error)):
        return words
    if _NEEDS_ASYNCIO.search(words):
        adapters = "trio_rollout_compat.asyncio_reward(fn, bridge=...) and asyncio_generate(fn, bridge=...)"
        return f"{words}. Asyncio code can't run in a task of Trio; {adapters} run it on an asyncio loop"
    if _NEEDS_MAIN_THREAD.search(words):
        return (
            f"{words}. trio_rollout.rewards.in_process(fn) runs a function in the main thread of a process, where it may "
            "use SIGALRM"
        )
    return words


def cause_of(error: BaseException, infrastructure: Sequence[type[BaseException] | str]) -> Cause:
    """Return the cause that an exception out of a rollout means; of a group, the one that all its leaves mean.

    ``infrastructure``: what counts as infrastructure beside ``InfrastructureError``, as in ``Retry``.
    """
    if isinstance(error, FailedElsewhere) and error.failure is not None:
        return error.failure.cause
    leaves = leaves_of(error)
    if all(isinstance(leaf, ServerLost) for leaf in leaves):
        return Cause.SERVER_LOST
    if all(_is_infrastructure(leaf, infrastructure) for leaf in leaves):
        return Cause.INFRASTRUCTURE
    return Cause.ERROR


def _is_infrastructure(error: BaseException, others: Sequence[type[BaseException] | str]) -> bool:
    # By name: the class may belong to a package that this one does not import, or to an exception in another process.
    wanted = {other if isinstance(other, str) else _name_of(other) for other in (InfrastructureError, *others)}
    return not wanted.isdisjoint(classes_of(error))


def _shortened(text: str) -> str:
    """Return the beginning and the end of a text that is too long: the end of a traceback names the exception."""
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[{left_out} characters are left out]\n{text[-half:]}"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001, ASYNC103  the user's __str__, or __notes__
        return "".join(traceback.format_tb(error.__traceback__))  # noqa: ASYNC104  a real cancellation was raised again above


@attrs.frozen(kw_only=True)
class Again:
    """Try the sample again. The counts include the try that failed; ``backoff`` numbers the wait, 0 for none."""

    attempts: int
    unpenalized: int
    backoff: int


# Causes without a backoff: the gate, the choice of a server or the drain already waits.
_NO_WAIT: Final = frozenset({Cause.WEIGHT_UPDATE, Cause.STALE, Cause.SHUTDOWN, Cause.CANCELLED})


def after_failure(
    cause: Cause, *, permanent: bool, attempts: int, unpenalized: int, new_tokens: int, retry: Retry, tries: int = 0
) -> Again | None:
    """Decide on a sample whose try has just ended without a result: another try, or None if the sample failed for good.

    ``attempts`` and ``unpenalized`` are the counts before this try. ``permanent``: no other try can end differently (bad
    input). ``new_tokens`` is the number of tokens that this try sampled: an unpenalized try counts only if there are none.
    ``tries`` is the number of all tries so far.
    """
    if permanent:
        return None
    if cause.uses_attempt:
        attempts += 1
        return Again(attempts=attempts, unpenalized=0, backoff=attempts) if attempts < retry.max_attempts else None
    unpenalized = 0 if new_tokens else unpenalized + 1
    if unpenalized > retry.max_free:
        return None
    # Infrastructure that fails after a good turn each time must not be tried in a tight loop either.
    least = tries if cause is Cause.INFRASTRUCTURE else 0
    backoff = 0 if cause in _NO_WAIT else min(max(least, unpenalized), 8)
    return Again(attempts=attempts, unpenalized=unpenalized, backoff=backoff)


@attrs.define(eq=False)
class FailureBudget:
    """Counts the groups that failed for good in a row, with none becoming ready in between: ``limit`` of them are no bad luck."""

    limit: int
    in_a_row: int = 0

    def group_ready(self) -> None:
        """Note that a group became ready: the count begins again."""
        self.in_a_row = 0

    def group_failed(self) -> bool:
        """Note that a group failed for good. Return True if the budget is used up."""
        self.in_a_row += 1
        return self.in_a_row >= self.limit
