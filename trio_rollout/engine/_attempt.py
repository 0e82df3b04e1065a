"""An attempt: one try at a group, with a deadline, a cancel scope and a single outcome.

Leaving the attempt's scope without an outcome *is* the requeue, and the cause says why. The first terminal outcome wins,
both ways: once an outcome is claimed, no cancellation can undo it; once the attempt is cancelled, a late result is thrown
away.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeAlias, final

import attrs
import trio

from .._core.enums import Cause
from .._core.failures import failure_of, leaves_of
from .._core.values import Failure, Group, GroupId, Prompt
from .._util.condition import Condition
from ..errors import GenerateError, RequestRejected, ServerLost
from ._gate import deadline_after

UNWANTED = "trio.Cancelled was raised although no scope was cancelled: user code had kept one and raised it again"


@attrs.frozen
class Finished:
    """The group is complete and scored."""

    group: Group


@attrs.frozen
class Dropped:
    """The group is complete, and the user's filter drops it."""

    group: Group
    reason: str


@attrs.frozen
class Unfinished:
    """The attempt ended without a result.

    ``permanent``: no other try can end differently. ``sample``: the index of the sample that failed, if it was one.
    """

    cause: Cause
    failure: Failure
    permanent: bool = False
    sample: int | None = None

    def failure_for(self, index: int) -> Failure:
        """Return the reason why this sample was not finished: its own failure, or that of a sibling that failed first."""
        if self.sample is None or self.sample == index:
            return self.failure
        why = f"sample {self.sample} failed first ({self.failure})"
        return attrs.evolve(self.failure, cause=Cause.SIBLING, type="", message=why, traceback="")


Result: TypeAlias = Finished | Dropped
Outcome: TypeAlias = Finished | Dropped | Unfinished


@attrs.define(eq=False)
class Attempt:
    """One try at a group: its identity, its scope and its outcome.

    ``generating`` is the number of its rollouts that still sample. ``begun`` is the weight version under which its first
    request was sent. ``empty_continuations`` counts how often in a row a turn went on after an interruption and got no
    token.
    """

    id: GroupId
    number: int
    prompt: Prompt
    generating: int
    scope: trio.CancelScope
    new_tokens: int = attrs.field(default=0, init=False)
    empty_continuations: int = attrs.field(default=0, init=False)
    begun: int | None = attrs.field(default=None, init=False)
    _end: Unfinished | None = attrs.field(default=None, init=False)
    _claimed: bool = attrs.field(default=False, init=False)

    @property
    def deadline(self) -> float:
        """The time at which the attempt must be over, on ``trio.current_time()``'s clock."""
        return self.scope.deadline

    @property
    def cause(self) -> Cause | None:
        """The reason why the attempt was cancelled; None if it was not."""
        return None if self._end is None else self._end.cause

    @property
    def is_out_of_time(self) -> bool:
        """True if the attempt's deadline has passed and nothing else had ended the attempt."""
        return self._end is None and not self._claimed and self._deadline_passed()

    def cancel(
        self,
        cause: Cause,
        why: str,
        *,
        failure: Failure | None = None,
        permanent: bool = False,
        sample: int | None = None,
    ) -> bool:
        """End the attempt without a result, unless it has ended already. Return True if this call ended it."""
        if self._claimed or self._end is not None:
            return False
        if self._deadline_passed():
            self._end = self._out_of_time()
        else:
            self._end = Unfinished(cause, failure or self._failure(cause, why), permanent, sample)
        self.scope.cancel(reason=f"{self._end.cause.value}: {why}")
        return self._end.cause is cause

    def fail(self, error: Exception, sample: int | None = None) -> None:
        """End the attempt because user code or a server raised this, in one sample or in code for the whole group.

        The cause follows from the exception. A server's error counts as one inside an exception group, too, if the group
        holds nothing else.
        """
        leaves = leaves_of(error)
        cause = Cause.SERVER_LOST if all(isinstance(leaf, ServerLost) for leaf in leaves) else Cause.ERROR
        permanent = all(isinstance(leaf, RequestRejected) for leaf in leaves)
        shown = leaves[0] if permanent or cause is Cause.SERVER_LOST else error
        failure = failure_of(shown, cause, group=self.id, attempt=self.number)
        self.cancel(cause, failure.message, failure=failure, permanent=permanent, sample=sample)

    def leave_unclaimed(self, sample: int) -> None:
        """Fail the attempt because a sample's scope was left without a result, unless the attempt has ended already.

        Only a Cancelled that user code had kept and raises again does that: it belongs to no scope that is left here, and
        the nursery above would swallow it (decision 0031).
        """
        self.cancel(Cause.ERROR, UNWANTED, failure=self._kept_cancelled(), sample=sample)

    def claim(self, result: Result) -> Outcome:
        """Make this the outcome, unless the attempt was cancelled before. Return the attempt's outcome."""
        if self._end is not None:
            return self._end
        self._claimed = True
        return result

    def unfinished(self) -> Unfinished:
        """Return the outcome of an attempt whose scope was left without a claim."""
        if self._end is not None:
            return self._end
        return self._out_of_time() if self._deadline_passed() else Unfinished(Cause.ERROR, self._kept_cancelled())

    async def give_up(self, cause: Cause, why: str, *, failure: Failure | None = None) -> GenerateError:
        """Cancel the attempt from inside one of its tasks.

        Raises Cancelled at once. Only inside a shield does this return: then with an exception for the caller to raise.
        """
        self.cancel(cause, why, failure=failure)
        await trio.lowlevel.checkpoint()
        return GenerateError(f"group {self.id}: attempt {self.number} is over ({self.unfinished().failure})")

    def _deadline_passed(self) -> bool:
        return trio.current_time() >= self.scope.deadline

    def _out_of_time(self) -> Unfinished:
        return Unfinished(Cause.DEADLINE, self._failure(Cause.DEADLINE, "the group's deadline passed"))

    def _kept_cancelled(self) -> Failure:
        return Failure(cause=Cause.ERROR, type="Cancelled", message=UNWANTED, group=self.id, attempt=self.number)

    def _failure(self, cause: Cause, why: str) -> Failure:
        return Failure(cause=cause, type="", message=why, group=self.id, attempt=self.number)


@final
@attrs.define(eq=False, repr=False)
class RunningAttempts:
    """The attempts between their start and the end of their settlement; ``changed`` is notified when one leaves."""

    changed: Condition = attrs.field(factory=Condition)
    _attempts: dict[Attempt, None] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    @contextmanager
    def holding(self, attempt: Attempt) -> Generator[None]:
        """Count this attempt as running for the block."""
        self._attempts[attempt] = None
        try:
            yield
        finally:
            del self._attempts[attempt]
            self.changed.notify()

    async def until_none(self) -> None:
        """Wait until no attempt is running. Cancelled, nothing has changed."""
        await self.changed.wait_until(lambda: not self._attempts)

    def cancel_all(self, cause: Cause, why: str) -> None:
        """Cancel every attempt that has no outcome yet."""
        for attempt in list(self._attempts):
            attempt.cancel(cause, why)

    def cancel_sampling(self, cause: Cause, why: str) -> None:
        """Cancel the attempts that still sample; those that are only being scored have all their tokens."""
        for attempt in list(self._attempts):
            if attempt.generating:
                attempt.cancel(cause, why)


def is_unwanted() -> bool:
    """Return True if a Cancelled that was just caught belongs to no scope: user code had kept one and raised it again."""
    return trio.current_effective_deadline() > trio.current_time()


def new_attempt(prompt: Prompt, number: int, *, rollouts: int, seconds: float | None) -> Attempt:
    """Return an attempt that may take ``seconds`` from now; None, zero and negative numbers mean any time."""
    return Attempt(prompt.group_id, number, prompt, rollouts, trio.CancelScope(deadline=deadline_after(seconds)))


_LOGGER = logging.getLogger("trio_rollout")


async def log_overdue_tasks(attempt: Attempt, show: Callable[[trio.lowlevel.Task], str]) -> None:
    """Log the attempt's task tree, as ``show`` renders it, when its deadline expires. Runs until cancelled.

    Trio delivers a cancellation before any task runs again, so an abort function sees every await as it was when the
    deadline expired.
    """
    nursery = trio.lowlevel.current_task().parent_nursery

    def log_tasks(_: object) -> trio.lowlevel.Abort:
        if nursery is not None and attempt.is_out_of_time:
            _LOGGER.warning(
                "group %s: the deadline of attempt %d has passed. Its tasks:\n%s",
                attempt.id,
                attempt.number,
                show(nursery.parent_task),
            )
        return trio.lowlevel.Abort.SUCCEEDED

    await trio.lowlevel.wait_task_rescheduled(log_tasks)
