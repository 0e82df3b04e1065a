"""The samples of one group: which are finished, which are missing, and when the group is done. No I/O, no clock.

A sample is what is paid for, so a failure ends a sample and not its group. ``Samples`` lives as long as its group is not
settled, over all of the group's attempts: a sample that is finished stays finished until the group settles or the sample
becomes too old, and each attempt runs only the samples that are missing.

Invariant 1 (conservation at sample grain): between any two calls each sample of the group is in exactly one state, and the
counts of all states add up to the number of samples.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import attrs

from .enums import Cause, TableKey
from .lifecycle import IllegalTransition
from .settings import Staleness
from .turn_log import RecordedTurn, TurnLog
from .values import Failure, Trajectory


class SampleState(TableKey):
    """The state of one sample."""

    MISSING = "missing"
    """It has no result and nothing runs for it; the group's next attempt will run it."""
    RUNNING = "running"
    """A try is under way."""
    RESTING = "resting"
    """A try failed; the next one begins after a backoff. It holds no slot."""
    FINISHED = "finished"
    """It has its trajectory, scored."""
    FAILED = "failed"
    """It failed for good: its tries are used up."""


class SampleEvent(TableKey):
    """An event in a sample's life."""

    START = "start"
    """A try begins."""
    REST = "rest"
    """The try failed, and another one will follow in the same attempt."""
    FINISH = "finish"
    """The try ended with a scored trajectory."""
    FAIL = "fail"
    """The try failed, and no other will follow."""
    STOP = "stop"
    """The group's attempt ended before the sample did."""
    DROP = "drop"
    """The finished sample is too old to be delivered."""


SAMPLE_TRANSITIONS: dict[SampleState, dict[SampleEvent, SampleState]] = {
    SampleState.MISSING: {
        SampleEvent.START: SampleState.RUNNING,
    },
    SampleState.RUNNING: {
        SampleEvent.REST: SampleState.RESTING,
        SampleEvent.FINISH: SampleState.FINISHED,
        SampleEvent.FAIL: SampleState.FAILED,
        SampleEvent.STOP: SampleState.MISSING,
    },
    SampleState.RESTING: {
        SampleEvent.START: SampleState.RUNNING,
        SampleEvent.FAIL: SampleState.FAILED,
        SampleEvent.STOP: SampleState.MISSING,
    },
    SampleState.FINISHED: {
        SampleEvent.DROP: SampleState.MISSING,
    },
    SampleState.FAILED: {},
}


@attrs.frozen
class SampleCounts:
    """The tries of one sample so far.

    ``attempts`` counts those that ended by the sample's own doing or by time (``Retry.max_attempts`` bounds them);
    ``unpenalized`` those in a row that ended by anything else without one new token (``Retry.max_free`` bounds them).
    ``tries`` counts every one that began.
    """

    attempts: int = 0
    unpenalized: int = 0
    tries: int = 0


@attrs.define(eq=False)
class Sample:
    """One sample: its state, its tries, and its result or the reason why it has none.

    A sample that is not finished has a trajectory if it only lacks a reward. ``turns`` are the recorded turns of its tries, as
    long as it is not finished; None if there are none to keep.
    """

    state: SampleState = SampleState.MISSING
    tries: int = 0
    attempts: int = 0
    unpenalized: int = 0
    trajectory: Trajectory | None = None
    tokens: int = 0
    failure: Failure | None = None
    turns: TurnLog | None = None

    @property
    def counts(self) -> SampleCounts:
        """Its tries as a value."""
        return SampleCounts(attempts=self.attempts, unpenalized=self.unpenalized, tries=self.tries)

    def count(self, counts: SampleCounts) -> None:
        """Take these for its tries."""
        self.tries, self.attempts, self.unpenalized = counts.tries, counts.attempts, counts.unpenalized


@final
@attrs.define(eq=False, repr=False)
class Samples:
    """The samples of one group, by index. ``wasted`` are the tokens that were sampled for them in vain, by cause."""

    _samples: tuple[Sample, ...]
    wasted: Counter[Cause] = attrs.field(factory=Counter)

    @classmethod
    def of(cls, count: int) -> "Samples":
        """Return ``count`` missing samples that were never tried."""
        return cls(tuple([Sample() for _ in range(count)]))

    @classmethod
    def recovered(
        cls,
        count: int,
        kept: Sequence[Trajectory],
        counts: Sequence[SampleCounts],
        max_attempts: float = math.inf,
        *,
        unscored: Sequence[Trajectory] = (),
        wasted: Mapping[Cause, int] | None = None,
        turns: Mapping[int, Sequence[RecordedTurn]] | None = None,
    ) -> "Samples":
        """Return the samples of a group as a ledger remembers them: ``kept`` are finished, the others are missing.

        ``counts`` has the tries of each sample by index, or is empty if none was ever tried in vain. A sample with
        ``max_attempts`` of them had failed for good, and stays so. Samples that are ``unscored`` only lack a reward. ``turns``:
        recorded turns, by the sample's index.
        """
        samples = tuple(Sample() for _ in range(count))
        for sample, tried in zip(samples, counts, strict=False):
            sample.count(tried)
        for trajectory in kept:
            samples[trajectory.index].state = SampleState.FINISHED
            samples[trajectory.index].trajectory = trajectory
            samples[trajectory.index].tokens = tokens_of(trajectory)
        for trajectory in unscored:
            if samples[trajectory.index].state is SampleState.MISSING:
                samples[trajectory.index].trajectory = trajectory
                samples[trajectory.index].tokens = tokens_of(trajectory)
        for sample in samples:
            if sample.state is SampleState.MISSING and sample.attempts >= max_attempts:
                sample.state = SampleState.FAILED
                sample.failure = Failure(cause=Cause.ERROR, type="", message="its tries were used up before a restart")
        for index, recorded in (turns or {}).items():
            if samples[index].state is SampleState.MISSING and samples[index].trajectory is None:
                samples[index].turns = TurnLog(list(recorded))
        return cls(samples, Counter(wasted or {}))

    def count(self, state: SampleState) -> int:
        """Return how many samples are in this state."""
        return [sample.state for sample in self._samples].count(state)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def missing(self) -> tuple[int, ...]:
        """Return the indices that the next attempt has to run."""
        return tuple([index for index, sample in enumerate(self._samples) if sample.state is SampleState.MISSING])

    def kept(self) -> tuple[Trajectory, ...]:
        """Return the finished trajectories, by index."""
        return tuple([sample.trajectory for sample in self._finished() if sample.trajectory is not None])

    def unscored(self) -> tuple[Trajectory, ...]:
        """Return what was sampled for samples that only lack a reward: it can be scored again."""
        others = (sample for sample in self._samples if sample.state is not SampleState.FINISHED)
        return tuple(sample.trajectory for sample in others if sample.trajectory is not None)

    def failures(self) -> Iterator[tuple[int, Failure]]:
        """Iterate over the samples that failed for good, with the failure of each."""
        for index, sample in enumerate(self._samples):
            if sample.state is SampleState.FAILED and sample.failure is not None:
                yield index, sample.failure

    @property
    def kept_tokens(self) -> int:
        """The number of tokens sampled for what is finished or only lacks a reward, and in recorded turns for the next try."""
        tokens = 0
        for sample in self._samples:
            tokens += sample.tokens
            if sample.turns is not None:
                tokens += sample.turns.tokens_left
        return tokens

    def can_complete(self, min_samples: int | None) -> bool:
        """Return False once too many samples failed for good; ``min_samples`` finished ones are enough, None means all."""
        failed = self.count(SampleState.FAILED)
        return not failed or (min_samples is not None and len(self._samples) - failed >= min_samples)

    def unfinished(self) -> tuple[int, ...]:
        """Return the indices for which a try is under way or will follow in this attempt."""
        under_way = (SampleState.RUNNING, SampleState.RESTING)
        return tuple([index for index, sample in enumerate(self._samples) if sample.state in under_way])

    def oldest_version(self) -> int | None:
        """Return the lowest weight version of what is finished; None if nothing is."""
        oldest = min((oldest_of(sample.trajectory) for sample in self._finished()), default=math.inf)
        return None if oldest == math.inf else int(oldest)

    def start(self, index: int) -> None:
        """Begin a try."""
        self._apply(index, SampleEvent.START)
        self._samples[index].tries += 1

    def rest(self, index: int, counts: SampleCounts) -> None:
        """End a try without a result; another one follows. ``counts`` include it."""
        self._apply(index, SampleEvent.REST)
        self._samples[index].count(counts)

    def finish(self, index: int, trajectory: Trajectory, tokens: int = 0) -> None:
        """End a try with this scored trajectory, for which so many tokens were sampled."""
        self._apply(index, SampleEvent.FINISH)
        self._samples[index].trajectory, self._samples[index].tokens = trajectory, tokens

    def fail(self, index: int, failure: Failure, counts: SampleCounts, unscored: Trajectory | None = None) -> None:
        """Give a sample up, for this reason. ``counts`` include the try that failed; ``unscored`` is what it sampled."""
        self._apply(index, SampleEvent.FAIL)
        sample = self._samples[index]
        sample.count(counts)
        sample.failure, sample.trajectory, sample.tokens = failure, unscored, 0

    def stop(self, index: int, counts: SampleCounts | None = None) -> None:
        """End a sample's try, or its rest, with the group's attempt. ``counts`` where that charges the sample."""
        self._apply(index, SampleEvent.STOP)
        if counts is not None:
            self._samples[index].count(counts)

    def drop(self, index: int) -> None:
        """Forget a finished sample: it is to be sampled again. Its tokens were in vain, like those of an unpenalized try."""
        self._apply(index, SampleEvent.DROP)
        sample = self._samples[index]
        self.wasted[Cause.STALE] += sample.tokens
        sample.trajectory, sample.tokens = None, 0
        sample.unpenalized += 1

    def stale(self, staleness: Staleness, version: int) -> tuple[int, ...]:
        """Return the finished samples that the settings refuse while the newest weights are of this version, by index.

        A sample that is still to be made will be of this version or a newer one, so ``spread`` counts from it.
        """
        newest = version if staleness.spread is None or self.missing() else self._newest_version()
        oldest_allowed = staleness.oldest_allowed(version, newest=newest)
        if oldest_allowed == -math.inf:
            return ()
        return tuple(
            index
            for index, sample in enumerate(self._samples)
            if sample.state is SampleState.FINISHED and oldest_of(sample.trajectory) < oldest_allowed
        )

    def _newest_version(self) -> float:
        spans = (span for row in self.kept() for segment in row.segments for span in segment.versions)
        return max((span.version for span in spans), default=-math.inf)

    # Lists and not generators here: these are asked several times for each group.
    def _finished(self) -> list[Sample]:
        return [sample for sample in self._samples if sample.state is SampleState.FINISHED]

    def _apply(self, index: int, event: SampleEvent) -> None:
        sample = self._samples[index]
        try:
            sample.state = SAMPLE_TRANSITIONS[sample.state][event]
        except KeyError:
            raise IllegalTransition(f"sample {index} that is {sample.state.value} cannot {event.value}") from None


def wasted_for_good(samples: Samples) -> Mapping[Cause, int]:
    """Return the wasted tokens of a group that is settled without the samples that were never scored."""
    lost = Counter(samples.wasted)
    for sample in samples:
        if sample.state is SampleState.FAILED and sample.trajectory is not None and sample.failure is not None:
            lost[sample.failure.cause] += tokens_of(sample.trajectory)
    return lost


def tokens_of(trajectory: Trajectory) -> int:
    """Return the number of tokens in a trajectory that were sampled and are trained."""
    return sum(int(segment.loss_mask.sum()) for segment in trajectory.segments)


def oldest_of(trajectory: Trajectory | None) -> float:
    """Return the lowest weight version of a trajectory's tokens; infinity if no token was sampled."""
    segments = () if trajectory is None else trajectory.segments
    return min((span.version for segment in segments for span in segment.versions), default=math.inf)
