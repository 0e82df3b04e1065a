"""One attempt at a group, and in it one try at each sample that is missing: two scopes, each with a single outcome.

Leaving a scope without an outcome *is* the retry, and its cause says why. The first terminal outcome wins, both ways: once
claimed, no cancellation can undo it; once cancelled, a late result is thrown away. A try that ends without a result costs
its own sample only (docs/decisions/0049-the-grain-is-the-sample.md). The attempt ends without one where no sample can differ:
input that no server takes, a sample that failed for good, the group's deadline, the drain.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import trio

from .._core.enums import Cause
from .._core.failures import Again, after_failure, cause_of, failure_of, leaves_of
from .._core.ledger_events import SampleKept, SamplesDropped, SamplesTried
from .._core.samples import SampleCounts, Samples, SampleState, oldest_of
from .._core.settings import Retry
from .._core.tally import Tally
from .._core.values import Failure, Group, GroupId, Prompt, Trajectory
from ..errors import FailedElsewhere, GenerateError, RequestRejected
from ._gate import deadline_after
from ._ledger import SampleRecorder
from ._turns import TurnKeeper

UNWANTED = "trio.Cancelled was raised although no scope was cancelled: user code had kept one and raised it again"


@attrs.frozen
class Finished:
    """The group is complete and scored."""

    group: Group


@attrs.frozen
class Dropped:
    """The group is complete, but the user's filter does not want it."""

    group: Group
    reason: str


@attrs.frozen
class Unfinished:
    """The attempt ended without a result. ``permanent``: no other attempt can end differently. ``sample``: whose failure it was."""

    cause: Cause
    failure: Failure
    permanent: bool = False
    sample: int | None = None

    def failure_for(self, index: int) -> Failure:
        """Return why this sample was not finished: its own failure, or that of the sample that failed first."""
        if self.sample is None or self.sample == index:
            return self.failure
        why = f"sample {self.sample} failed first ({self.failure})"
        return attrs.evolve(self.failure, cause=Cause.SIBLING, type="", message=why, traceback="")


Result: TypeAlias = Finished | Dropped
Outcome: TypeAlias = Finished | Dropped | Unfinished


@attrs.frozen
class TryFailed:
    """A try ended without a result. ``permanent``: no other try can end differently. ``unscored``: it sampled this."""

    cause: Cause
    failure: Failure
    permanent: bool = False
    unscored: Trajectory | None = None


@attrs.define(eq=False)
class SampleTry:
    """One try at a sample, the rollout scope: its identity, its scope and its single outcome.

    ``number`` counts the tries of the sample, from 1. ``generating`` is true until its generate function is over; ``begun``
    is the weight version its first request was sent under; ``empty_continuations``: how often in a row a turn went on after
    an interruption and got no token.
    """

    attempt: "Attempt"
    index: int
    number: int
    scope: trio.CancelScope
    generating: bool = attrs.field(default=True, init=False)
    new_tokens: int = attrs.field(default=0, init=False)
    tokens_given_back: int = attrs.field(default=0, init=False)
    """Tokens of recorded turns: an earlier try sampled them."""
    sampled: Trajectory | None = attrs.field(default=None, init=False)
    """What it is to have a reward for, once its generate function has returned."""
    empty_continuations: int = attrs.field(default=0, init=False)
    begun: int | None = attrs.field(default=None, init=False)
    calls: int = attrs.field(default=0, init=False)
    """Its requests that are on a server."""
    is_kept: bool = attrs.field(default=False, init=False)
    """Its trajectory is its sample's."""
    _end: TryFailed | None = attrs.field(default=None, init=False)

    @property
    def id(self) -> GroupId:
        """The group's id."""
        return self.attempt.id

    @property
    def deadline(self) -> float:
        """When it must be over, on ``trio.current_time()``'s clock."""
        return min(self.scope.deadline, self.attempt.deadline)

    @property
    def cause(self) -> Cause | None:
        """The reason why it ended without a result; None if it did not."""
        return None if self._end is None else self._end.cause

    def take_unscored(self) -> Trajectory | None:
        """Return what an earlier try sampled, if only a reward is missing; None otherwise."""
        sample = self.attempt.samples[self.index]
        found, tokens = sample.trajectory, sample.tokens
        sample.trajectory, sample.tokens = None, 0
        if found is not None:
            self.generating, self.new_tokens = False, tokens
            self.attempt.tally.take_up(tokens)
            if math.isfinite(oldest := oldest_of(found)):
                self.begin(int(oldest))
        return found

    def note_tokens(self, tokens: int) -> None:
        """Note that a turn brought so many tokens."""
        self.new_tokens += tokens
        self.attempt.tally.sample(tokens)
        if self.attempt.tries.get(self.index) is not self:  # a call in a nursery of user code that outlived the try
            self.attempt.lose(self.cause or Cause.ERROR, tokens)

    @property
    def tokens(self) -> int:
        """The number of its tokens, whichever try sampled them."""
        return self.new_tokens + self.tokens_given_back

    def take_back(self, tokens: int, version: int) -> None:
        """Note that it got a recorded turn of so many tokens, the oldest of this weight version."""
        self.tokens_given_back += tokens
        self.attempt.tally.give_back(tokens)
        self.begin(version if self.begun is None else min(self.begun, version))

    @property
    def is_current(self) -> bool:
        """True until it ends in any way."""
        ended = self.is_kept or self._end is not None or self.attempt.has_ended
        return not ended and self.attempt.tries.get(self.index) is self

    def begin(self, version: int) -> None:
        """Note the weight version that its first request is sent under."""
        self.begun = version
        attempt = self.attempt
        if attempt.begun is None or version < attempt.begun:
            attempt.begun = version

    def cancel(self, cause: Cause, why: str, *, failure: Failure | None = None) -> bool:
        """End it without a result, unless it or its attempt has ended already; return True if this call did it."""
        if self.is_kept or self._end is not None or self.attempt.has_ended:
            return False
        if self._deadline_passed():
            self._end = self._out_of_time()
        else:
            self._end = TryFailed(cause, failure or self.attempt.new_failure(cause, why))
        self.scope.cancel(reason=f"{self._end.cause.value}: {why}")
        return self._end.cause is cause

    def fail(self, error: BaseException, retry: Retry, unscored: Trajectory | None = None) -> None:
        """Note that user code or a server raised this, unless the try has ended already.

        A server's word counts as such out of nurseries of user code too, if nothing else is in their group.
        """
        if self.is_kept or self._end is not None:
            return
        leaves = leaves_of(error)
        cause = cause_of(error, retry.infrastructure)
        permanent = all(isinstance(leaf, RequestRejected) for leaf in leaves)
        shown = leaves[0] if permanent or cause is not Cause.ERROR else error
        failure = failure_of(shown, cause, group=self.id, attempt=self.attempt.number)
        if isinstance(error, FailedElsewhere) and unscored is None:
            permanent, self.sampled = error.permanent, error.unscored
            unscored = error.unscored if permanent else None
        self._end = TryFailed(cause, failure, permanent or unscored is not None, unscored)

    def claim(self, trajectory: Trajectory) -> bool:
        """Make this the outcome, unless the try or its attempt was cancelled before; return True if it is."""
        if self._end is None and not self.attempt.has_ended:
            self.is_kept = True
            self.attempt.keep(trajectory, self.tokens)
        return self.is_kept

    def failed(self) -> TryFailed:
        """Return the outcome of a try whose scope was left without a result.

        A scope that is left without a claim, a failure or a deadline was left by a Cancelled that user code had kept: it
        belongs to no scope that is left here (docs/decisions/0031-a-kept-cancelled-is-a-scope-left-without-a-claim.md).
        """
        if self._end is None:
            kept = self.attempt.new_failure(Cause.ERROR, UNWANTED, "Cancelled")
            self._end = self._out_of_time() if self._deadline_passed() else TryFailed(Cause.ERROR, kept)
        return self._end

    async def give_up(self, cause: Cause, why: str, *, failure: Failure | None = None) -> GenerateError:
        """Cancel the try from inside one of its tasks.

        Raises Cancelled at once. Only a caller that shields itself comes back from here, with an exception to raise.
        """
        self.cancel(cause, why, failure=failure)
        await trio.lowlevel.checkpoint()
        return GenerateError(f"group {self.id}, sample {self.index}: try {self.number} is over ({why})")

    def _deadline_passed(self) -> bool:
        return trio.current_time() >= self.scope.deadline

    def _out_of_time(self) -> TryFailed:
        why = "the rollout's deadline passed"
        return TryFailed(Cause.DEADLINE, self.attempt.new_failure(Cause.DEADLINE, why))


@attrs.define(eq=False)
class Attempt:
    """One attempt at a group: its identity, its scope, the tries under way and its single outcome.

    ``samples`` outlives the attempt: what is finished stays so, and the next attempt runs what is missing. ``begun`` is the
    oldest weight version of anything in it.
    """

    id: GroupId
    number: int
    prompt: Prompt
    samples: Samples
    scope: trio.CancelScope
    min_samples: int | None = None
    recorder: SampleRecorder | None = None
    tally: Tally = attrs.field(factory=Tally)
    turns: TurnKeeper | None = None
    """The recorded turns of its samples; None if turns are not recorded."""
    tries: dict[int, SampleTry] = attrs.field(factory=dict, init=False)
    begun: int | None = attrs.field(default=None, init=False)
    _end: Unfinished | None = attrs.field(default=None, init=False)
    _claimed: bool = attrs.field(default=False, init=False)

    @property
    def deadline(self) -> float:
        """When it must be over, on ``trio.current_time()``'s clock."""
        return self.scope.deadline

    @property
    def cause(self) -> Cause | None:
        """Why it was cancelled; None while it was not."""
        return None if self._end is None else self._end.cause

    @property
    def has_ended(self) -> bool:
        """True once it has its outcome, or was cancelled."""
        return self._claimed or self._end is not None

    @property
    def is_out_of_time(self) -> bool:
        """True if nothing has ended it but its deadline."""
        return not self.has_ended and self._deadline_passed()

    @property
    def is_held_up(self) -> bool:
        """True while an unfinished sample rests, or its tries have failed."""
        return any(
            sample.state is SampleState.RESTING
            or (sample.state is SampleState.RUNNING and (sample.attempts or sample.unpenalized))
            for sample in self.samples
        )

    def note_oldest(self) -> None:
        """Find the oldest weight version of what is left, after a sample or a try was thrown away."""
        versions = [each.begun for each in self.tries.values() if each.begun is not None]
        kept = self.samples.oldest_version()
        self.begun = min([*versions, *([] if kept is None else [kept])], default=None)

    def keep(self, trajectory: Trajectory, tokens: int) -> None:
        """Keep a finished sample until the group settles; the ledger gets it in the background."""
        self.samples.finish(trajectory.index, trajectory, tokens)
        self._keep(trajectory, tokens, scored=True)

    def _keep(self, trajectory: Trajectory, tokens: int, *, scored: bool) -> None:
        self.tally.keep(tokens)
        if self.turns is not None:
            self.turns.finish(trajectory.index)
        if self.recorder is not None:
            self.recorder.note(
                SampleKept(id=self.id, attempt=self.number, trajectory=trajectory, tokens=tokens, scored=scored)
            )

    def lose(self, cause: Cause, tokens: int) -> None:
        """Note that so many tokens were sampled in vain."""
        self.tally.lose(cause, tokens)
        self.samples.wasted[cause] += tokens

    def drop(self, indices: Sequence[int]) -> None:
        """Throw finished samples away that are too old: they are to be sampled again."""
        if not indices:
            return
        for index in indices:
            self.tally.drop(Cause.STALE, self.samples[index].tokens)
            self.tally.retries[Cause.STALE] += 1
            self.samples.drop(index)
        if self.recorder is not None:
            self.recorder.note(SamplesDropped(id=self.id, indices=tuple(indices)))
        self.note_oldest()

    # Two functions and not a context manager: that cost a fiftieth of a small rollout.
    def begin_try(self, index: int, seconds: float | None) -> SampleTry:
        """Begin a try at a sample, which may take so many seconds. Its end must be noted with ``end_try``."""
        self.samples.start(index)
        self.tally.tries += 1
        this = SampleTry(self, index, self.samples[index].tries, trio.CancelScope(deadline=deadline_after(seconds)))
        self.tries[index] = this
        return this

    def end_try(self, this: SampleTry) -> None:
        """Note that a try is over, whatever its outcome."""
        del self.tries[this.index]
        if not this.is_kept:
            self._note_failed(this)

    def _note_failed(self, this: SampleTry) -> None:
        """Note the tokens and the tries of a try that ended without a result. What only lacks a reward is kept for the next."""
        cause, sample = this.cause or self.cause or Cause.DEADLINE, self.samples[this.index]
        if this.sampled is not None and sample.state is not SampleState.FAILED:
            sample.trajectory, sample.tokens = this.sampled, this.tokens
            self._keep(this.sampled, this.tokens, scored=False)
        else:
            lost = this.tokens if self.turns is None else this.tokens - self.turns.end_try(this.index, cause)
            self.tally.lose(cause, lost)
            self.samples.wasted[cause] += lost if this.sampled is None else 0
        if self.recorder is not None:
            counts = tuple([sample.counts for sample in self.samples])
            self.recorder.note(SamplesTried(id=self.id, samples=counts, wasted=dict(self.samples.wasted)))

    def settle_try(self, this: SampleTry, failed: TryFailed, retry: Retry) -> Again | None:
        """Decide what follows a failed try: another one, or None if its sample failed for good.

        A sample that failed for good ends the attempt, unless enough samples of the group can still be finished.
        """
        if failed.permanent and failed.unscored is None:  # input that no server takes: no sibling can differ
            self.samples.stop(this.index)
            self.cancel(failed.cause, failed.failure.message, failure=failed.failure, permanent=True, sample=this.index)
            return None
        counts = self.samples[this.index].counts
        verdict = after_failure(
            failed.cause,
            permanent=failed.permanent,
            attempts=counts.attempts,
            unpenalized=counts.unpenalized + this.empty_continuations,
            new_tokens=this.new_tokens,
            retry=retry,
            tries=counts.tries,
        )
        if verdict is not None:
            self.samples.rest(this.index, _counted(counts, verdict))
            self.tally.retries[failed.cause] += 1
        else:
            counts = attrs.evolve(counts, attempts=max(counts.attempts, retry.max_attempts))
            self.samples.fail(this.index, failed.failure, counts, this.sampled)
        this.begun = None
        self.note_oldest()
        if verdict is not None:
            return verdict
        if not self.samples.can_complete(self.min_samples):
            self.cancel(failed.cause, failed.failure.message, failure=failed.failure, permanent=True, sample=this.index)
        return None

    def cancel(
        self,
        cause: Cause,
        why: str,
        *,
        failure: Failure | None = None,
        permanent: bool = False,
        sample: int | None = None,
    ) -> bool:
        """End it without a result, unless it has ended already; return True if this call did it."""
        if self.has_ended:
            return False
        if self._deadline_passed():
            self._end = self._out_of_time()
        else:
            self._end = Unfinished(cause, failure or self.new_failure(cause, why), permanent, sample)
        self.scope.cancel(reason=f"{self._end.cause.value}: {why}")
        return self._end.cause is cause

    def fail(self, error: BaseException, retry: Retry) -> None:
        """Note that user code over the whole group raised this (its group reward, its filter): no other attempt can help."""
        cause = cause_of(error, retry.infrastructure)
        failure = failure_of(error, cause, group=self.id, attempt=self.number)
        self.cancel(cause, failure.message, failure=failure, permanent=True)

    def claim(self, result: Result) -> Outcome:
        """Make this the outcome, unless the attempt was cancelled before."""
        if self._end is not None:
            return self._end
        self._claimed = True
        return result

    def unfinished(self) -> Unfinished:
        """Return the outcome of an attempt whose scope was left without a claim."""
        if self._end is None:
            kept = self.new_failure(Cause.ERROR, UNWANTED, "Cancelled")
            self._end = (
                self._out_of_time() if self._deadline_passed() else Unfinished(Cause.ERROR, kept, permanent=True)
            )
        return self._end

    def stop_samples(self, cause: Cause, failure: Failure, retry: Retry) -> None:
        """End what is not finished with the attempt. The group's deadline counts as one try of each such sample.

        A sample that rests because something else than itself failed is not charged.
        """
        for index in self.samples.unfinished():
            sample = self.samples[index]
            counts = sample.counts
            if cause is not Cause.DEADLINE or (sample.state is SampleState.RESTING and counts.unpenalized):
                self.samples.stop(index)
                continue
            verdict = after_failure(
                cause, permanent=False, attempts=counts.attempts, unpenalized=0, new_tokens=0, retry=retry
            )
            if verdict is not None:
                self.samples.stop(index, _counted(counts, verdict))
            else:
                self.tally.drop(cause, sample.tokens)
                self.samples.fail(index, failure, counts, sample.trajectory)
                if self.turns is not None:
                    self.turns.forget(index, cause)

    def _deadline_passed(self) -> bool:
        return trio.current_time() >= self.scope.deadline

    def _out_of_time(self) -> Unfinished:
        return Unfinished(Cause.DEADLINE, self.new_failure(Cause.DEADLINE, "the group's deadline passed"))

    def new_failure(self, cause: Cause, why: str, kind: str = "") -> Failure:
        """Return a failure in this attempt that is not made from an exception."""
        return Failure(cause=cause, type=kind, message=why, group=self.id, attempt=self.number)


def _counted(counts: SampleCounts, verdict: Again) -> SampleCounts:
    return attrs.evolve(counts, attempts=verdict.attempts, unpenalized=verdict.unpenalized)


def new_attempt(
    prompt: Prompt,
    number: int,
    samples: Samples,
    *,
    seconds: float | None,
    min_samples: int | None = None,
    recorder: SampleRecorder | None = None,
    tally: Tally | None = None,
    turns: TurnKeeper | None = None,
) -> Attempt:
    """Return an attempt that may take so many seconds from now; None, zero or less: any time."""
    scope = trio.CancelScope(deadline=deadline_after(seconds))
    attempt = Attempt(prompt.group_id, number, prompt, samples, scope, min_samples, recorder, tally or Tally(), turns)
    attempt.note_oldest()
    return attempt
