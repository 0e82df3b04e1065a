"""The table of a group's life, and the decisions that go with it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout import Cause, Retry
from trio_rollout._core.admission import Load, pullable, startable
from trio_rollout._core.batching import Answer, Supply, decide
from trio_rollout._core.book import Book
from trio_rollout._core.failures import FailureBudget, after_failure
from trio_rollout._core.lifecycle import TRANSITIONS, Event, IllegalTransition, State, step
from trio_rollout.errors import SourceError
from trio_rollout.testing import prompts


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_in_the_table_or_refused(state, event):
    if event in TRANSITIONS[state]:
        assert step(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransition, match=f"{state.value} cannot {event.value}"):
            step(state, event)


def test_every_state_can_be_reached_and_what_is_over_stays_over():
    reached = {after for events in TRANSITIONS.values() for after in events.values()}
    assert reached | {State.WAITING} == set(State)
    for over in (State.ACKED, State.FILTERED, State.QUARANTINED, State.RETURNED):
        assert not TRANSITIONS[over]


@given(st.lists(st.sampled_from(list(Event)), max_size=30))
def test_an_illegal_event_changes_nothing_and_the_counts_always_add_up(events):
    book = Book()
    entry = book.pull(prompts(1)[0])
    for event in events:
        before = entry.state
        legal = event in TRANSITIONS[before]
        try:
            book.apply(entry, event)
        except IllegalTransition:
            assert not legal
            assert entry.state is before
        assert sum(book.count(state) for state in State) == book.pulled == 1
        assert book.count(entry.state) == 1


def test_the_same_prompt_twice_in_an_epoch_is_the_sources_fault():
    book = Book()
    book.pull(prompts(1)[0])
    with pytest.raises(SourceError, match="twice"):
        book.pull(prompts(1)[0])


@pytest.mark.parametrize("cause", list(Cause))
def test_deadline_no_progress_and_error_use_up_an_attempt_the_others_do_not(cause):
    verdict = after_failure(
        cause, permanent=False, attempts=1, unpenalized=4, new_tokens=0, retry=Retry(max_attempts=3)
    )
    assert verdict is not None
    counted = cause in {Cause.DEADLINE, Cause.NO_PROGRESS, Cause.ERROR}
    assert (verdict.attempts, verdict.unpenalized) == ((2, 0) if counted else (1, 5))


def test_the_last_attempt_the_hundredth_free_requeue_and_bad_input_are_the_end():
    retry = Retry(max_attempts=3, max_free=100)
    give_up = [
        after_failure(Cause.ERROR, permanent=False, attempts=2, unpenalized=0, new_tokens=0, retry=retry),
        after_failure(Cause.SERVER_LOST, permanent=False, attempts=0, unpenalized=100, new_tokens=0, retry=retry),
        after_failure(Cause.ERROR, permanent=True, attempts=0, unpenalized=0, new_tokens=0, retry=retry),
    ]
    assert give_up == [None, None, None]


def test_a_free_requeue_with_new_tokens_begins_the_count_again():
    verdict = after_failure(Cause.SERVER_LOST, permanent=False, attempts=0, unpenalized=99, new_tokens=1, retry=Retry())
    assert verdict.unpenalized == 0


def test_f024_the_failure_budget_counts_failures_in_a_row():
    """F S F S F S F with a budget of 3 is not exhausted; F F F is."""
    budget = FailureBudget(3)
    for _ in range(4):
        assert not budget.group_failed()
        budget.group_ready()
    assert [budget.group_failed() for _ in range(3)] == [False, False, True]


LOADS = st.builds(
    Load,
    open=st.booleans(),
    free_slots=st.integers(0, 50),
    per_group=st.integers(1, 8),
    eligible=st.integers(0, 20),
    finished=st.integers(0, 20),
    bound=st.integers(1, 20),
    exhausted=st.booleans(),
    fresh_room=st.none() | st.integers(0, 10),
    ahead=st.integers(0, 5),
)


@given(LOADS)
def test_admission_never_exceeds_slots_waiting_groups_or_what_stays_fresh(load):
    start, pull = startable(load), pullable(load)
    assert 0 <= start <= load.eligible
    assert start * load.per_group <= load.free_slots
    assert start == 0 or (load.open and load.finished < load.bound)
    assert load.fresh_room is None or start <= load.fresh_room
    assert pull >= 0
    assert pull == 0 or (load.open and not load.exhausted)


SUPPLIES = st.builds(
    Supply,
    ready=st.integers(0, 10),
    unfinished=st.integers(0, 10),
    exhausted=st.booleans(),
    drained=st.booleans(),
    failed=st.booleans(),
    failure_told=st.booleans(),
    due=st.integers(0, 2),
)


@given(st.integers(1, 8), SUPPLIES)
def test_a_consumer_waits_only_for_what_can_come(size, supply):
    decision = decide(size, supply)
    if decision.answer is Answer.WAIT:
        assert not supply.failed
        assert not supply.drained
        assert supply.unfinished or not supply.exhausted
    if decision.answer is Answer.TAKE:
        assert 0 < decision.count <= min(size, supply.ready)
    if decision.answer is Answer.END:
        assert not supply.ready
        assert not supply.unfinished
