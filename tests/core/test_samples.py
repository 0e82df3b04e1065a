"""The table of a sample's life, and what it says of its group."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout import Cause, Failure, Segment, Staleness, Trajectory, VersionSpan
from trio_rollout._core.lifecycle import IllegalTransition
from trio_rollout._core.samples import (
    SAMPLE_TRANSITIONS,
    SampleCounts,
    SampleEvent,
    Samples,
    SampleState,
)
from trio_rollout.testing import prompts

N = 4
FAILURE = Failure(cause=Cause.ERROR, type="ValueError", message="no")
(PROMPT,) = prompts(1)


def row(index: int, version: int = 0) -> Trajectory:
    """A trajectory of one token of this version."""
    span = VersionSpan(0, 1, version)
    segment = Segment(tokens=[1, 2], response_length=1, loss_mask=[1], log_probs=[-0.5], versions=[span])
    return Trajectory(prompt=PROMPT, index=index, segments=[segment])


def apply(samples: Samples, index: int, event: SampleEvent) -> None:
    """Do to one sample what the event stands for."""
    match event:
        case SampleEvent.START:
            samples.start(index)
        case SampleEvent.REST:
            samples.rest(index, SampleCounts(attempts=1))
        case SampleEvent.FINISH:
            samples.finish(index, row(index))
        case SampleEvent.FAIL:
            samples.fail(index, FAILURE, SampleCounts(attempts=3))
        case SampleEvent.STOP:
            samples.stop(index)
        case SampleEvent.DROP:
            samples.drop(index)


PATHS = {
    SampleState.MISSING: (),
    SampleState.RUNNING: (SampleEvent.START,),
    SampleState.RESTING: (SampleEvent.START, SampleEvent.REST),
    SampleState.FINISHED: (SampleEvent.START, SampleEvent.FINISH),
    SampleState.FAILED: (SampleEvent.START, SampleEvent.FAIL),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SampleState, SampleEvent)))
def test_every_pair_is_in_the_table_or_refused(state, event):
    samples = Samples.of(1)
    for step in PATHS[state]:
        apply(samples, 0, step)
    if event in SAMPLE_TRANSITIONS[state]:
        apply(samples, 0, event)
        assert samples[0].state is SAMPLE_TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransition, match=f"sample 0 that is {state.value} cannot {event.value}"):
            apply(samples, 0, event)
        assert samples[0].state is state


@given(st.lists(st.tuples(st.integers(0, N - 1), st.sampled_from(list(SampleEvent))), max_size=60))
def test_the_counts_always_add_up_and_only_finished_samples_are_kept(events):
    samples = Samples.of(N)
    for index, event in events:
        if event in SAMPLE_TRANSITIONS[samples[index].state]:
            apply(samples, index, event)
        assert sum(samples.count(state) for state in SampleState) == N
        assert [row.index for row in samples.kept()] == [
            each for each in range(N) if samples[each].state is SampleState.FINISHED
        ]
        assert all(samples[each].state is SampleState.MISSING for each in samples.missing())
        assert len(samples.missing()) == samples.count(SampleState.MISSING)


def with_results(finished: int, failed: int) -> Samples:
    """Samples of which so many are finished and so many failed for good."""
    samples = Samples.of(N)
    for index in range(finished + failed):
        samples.start(index)
        if index < finished:
            samples.finish(index, row(index))
        else:
            samples.fail(index, FAILURE, SampleCounts(attempts=3))
    return samples


@pytest.mark.parametrize(
    ("finished", "failed", "min_samples", "can_complete"),
    [
        (0, 0, None, True),
        (4, 0, None, True),
        (3, 1, None, False),
        (0, 1, None, False),
        (0, 1, 3, True),
        (3, 1, 3, True),
        (2, 2, 3, False),
        (0, 2, 3, False),
        (0, 4, 0, True),
    ],
)
def test_a_group_can_be_complete_while_enough_samples_have_not_failed_for_good(
    finished, failed, min_samples, can_complete
):
    assert with_results(finished, failed).can_complete(min_samples) is can_complete


def test_a_restart_keeps_what_was_finished_and_the_counts_of_the_others():
    counts = [SampleCounts(), SampleCounts(attempts=2), SampleCounts(unpenalized=5), SampleCounts()]
    samples = Samples.recovered(N, [row(0), row(3)], counts)

    assert samples.missing() == (1, 2)
    assert samples[1].counts.attempts == 2
    assert [each.index for each in samples.kept()] == [0, 3]


@pytest.mark.parametrize(
    ("max_versions", "spread", "version", "stale"),
    [
        (None, None, 9, ()),
        (7, None, 9, (0, 1)),
        (None, 1, 9, (0, 1)),
        (None, 0, 9, (0, 1, 2)),
        (0, 5, 3, (0, 1, 2)),
        (9, 3, 9, ()),
    ],
)
def test_samples_that_the_settings_of_staleness_refuse_are_named(max_versions, spread, version, stale):
    samples = Samples.of(N)
    for index in range(N):
        samples.start(index)
        samples.finish(index, row(index, version=index))

    assert samples.stale(Staleness(max_versions=max_versions, spread=spread), version) == stale


def test_a_sample_that_is_still_to_be_made_counts_as_one_of_the_newest_weights():
    samples = with_results(finished=2, failed=0)

    assert samples.stale(Staleness(spread=1), version=1) == ()
    assert samples.stale(Staleness(spread=1), version=2) == (0, 1)


def test_tokens_of_a_sample_whose_scorer_failed_are_kept_apart():
    samples = Samples.of(2)
    for index in range(2):
        samples.start(index)
    samples.finish(0, row(0))
    samples.fail(1, FAILURE, SampleCounts(attempts=1), unscored=row(1))

    assert [each.index for each in samples.kept()] == [0]
    assert [each.index for each in samples.unscored()] == [1]
    assert dict(samples.failures()) == {1: FAILURE}
