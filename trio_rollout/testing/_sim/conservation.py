"""Conservation of groups, slots, samples and tokens in one engine, to be checked between any two steps of a run (P1, P11).

The counts of an engine add up by construction: each change moves a token from one to another. So the tokens are counted
here a second time, where they are: in the tries under way, in the recorded turns, and in the samples that are finished or
only lack a reward.
"""

from collections.abc import Iterator, Sequence
from typing import NoReturn, final

import attrs

from ..._core.book import Entry
from ..._core.enums import Cause, Resume
from ..._core.lifecycle import State
from ..._core.samples import Sample, SampleState
from ..._core.values import GroupId
from ...engine._engine import RolloutEngine
from ...engine._running import RunningAttempts
from ...engine._slots import Slots

_UNDER_WAY = frozenset({SampleState.RUNNING, SampleState.RESTING})


@attrs.frozen(eq=False)
class _Seen:
    """The samples of one group when something had changed: the group's state, and the state and the tokens of each sample.

    ``kept`` is the number of tokens of samples that are finished, or only lack a reward.
    """

    state: State
    samples: Sequence[SampleState]
    tokens: Sequence[int]
    kept: int

    def unfinished_since(self, before: "_Seen") -> Iterator[int]:
        """Yield the indices of samples that were finished then and are not any more."""
        for index, (then, now) in enumerate(zip(before.samples, self.samples, strict=True)):
            if then is SampleState.FINISHED and now is not SampleState.FINISHED:
                yield index


@final
@attrs.define(eq=False)
class Conservation:
    """Call it between two steps; raises AssertionError where something is lost, or is there twice.

    A finished sample stays finished until its group settles, or until it is too old for the settings. A sample is under way in
    running groups only, at most once, and in a slot.
    """

    _engine: RolloutEngine
    _seen: dict[GroupId, _Seen] = attrs.field(factory=dict, init=False)
    _too_old: int = attrs.field(default=0, init=False)
    """Tokens of finished samples that had to be sampled again."""

    def __call__(self) -> None:
        """Check once."""
        state = self._engine._state  # not statistics(): that counts connections too
        if state.book.pulled != sum(state.book.counts.values()):
            self._fail("a group is in no state or in two")
        if len(state.running) > state.book.count(State.RUNNING):
            self._fail(f"{len(state.running)} attempts at {state.book.count(State.RUNNING)} running groups")
        kept, turns = 0, state.context.settings.resume is Resume.TURNS
        for entry in state.book.entries(State.WAITING, State.RUNNING, State.READY):
            samples, tokens, seen = [], [], self._seen.get(entry.id)
            for sample in entry.samples:
                samples.append(sample.state)
                tokens.append(sample.tokens)
            if seen is None or samples != seen.samples or tokens != seen.tokens or entry.state is not seen.state:
                seen = self._look(entry, _Seen(entry.state, samples, tokens, sum(tokens)), seen)
            kept += seen.kept + (_left_turns(entry) if turns else 0)
        self._check_tokens(kept, self._tokens_of_tries(state.running, state.slots))
        self._tokens_of_tries(state.evaluations, state.evaluation_slots)

    def _look(self, entry: Entry, now: _Seen, before: _Seen | None) -> _Seen:
        """Check a group in which something has changed since the last step."""
        samples = now.samples
        if any(sample.trajectory is None for sample in entry.samples if _must_have(sample)):
            self._fail(f"group {entry.id}: a finished or kept sample has no trajectory: {samples}, {now.tokens}")
        if entry.state is not State.RUNNING and not _UNDER_WAY.isdisjoint(samples):
            self._fail(f"group {entry.id} is {entry.state.value} and has samples under way: {samples}")
        if entry.group is not None and len(entry.group.trajectories) != samples.count(SampleState.FINISHED):
            self._fail(f"group {entry.id} is {entry.state.value} without its samples: {samples}")
        lost = [] if before is None else list(now.unfinished_since(before))
        if lost and before is not None:
            staleness = self._engine._state.context.settings.staleness
            if staleness.max_versions is None and staleness.spread is None:
                self._fail(f"group {entry.id}: finished samples {lost} are missing again")
            self._too_old += sum(before.tokens[index] for index in lost)
        self._seen[entry.id] = now
        return now

    def _tokens_of_tries(self, attempts: RunningAttempts, slots: Slots) -> int:
        """Return the number of tokens in the tries under way; each try is one of a running sample, in a slot."""
        tries = tokens = 0
        for attempt in attempts:
            for index, this in attempt.tries.items():
                tries += 1
                tokens += this.tokens
                if attempt.samples[index].state is not SampleState.RUNNING:
                    self._fail(f"group {attempt.id}: a try at sample {index}, {attempt.samples[index].state.value}")
        if not tries <= slots.in_use <= slots.total:
            self._fail(f"{tries} tries are under way in {slots.in_use} slots of {slots.total}")
        return tokens

    def _check_tokens(self, kept: int, in_flight: int) -> None:
        tally = self._engine._state.tally
        counted = tally.tokens()
        if not tally.is_conserved() or (counted.kept, counted.in_flight) != (kept, in_flight):
            self._fail(f"{kept} tokens are kept and {in_flight} in flight, counted are {counted} of {tally.sampled}")
        if self._too_old > counted.wasted.get(Cause.STALE, 0):
            self._fail(f"{self._too_old} tokens were too old, counted are {counted}")

    def _fail(self, why: str) -> NoReturn:
        raise AssertionError(f"{why}: {self._engine.statistics()}")


def _left_turns(entry: Entry) -> int:
    """Return the number of tokens in recorded turns that no try under way was given back."""
    return sum(sample.turns.tokens_left for sample in entry.samples if sample.turns is not None)


def _must_have(sample: Sample) -> bool:
    """Return True for a sample that must have a trajectory."""
    return sample.state is SampleState.FINISHED or bool(sample.tokens)
