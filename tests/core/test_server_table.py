"""The table of a server's life: every state, every event, and answers that come late."""

import itertools
from collections import deque
from functools import cache

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout._core.lifecycle import IllegalTransition
from trio_rollout._core.server import (
    TRANSITIONS,
    Effect,
    Event,
    Standing,
    State,
    Told,
    counts,
    due,
    step,
)
from trio_rollout._core.weights import Named, Past, Weights

ANSWERS = {
    Event.PAUSE_ANSWERED,
    Event.RESUME_ANSWERED,
    Event.PROBED,
    Event.NOT_READY,
    Event.VERSION_NAMED,
    Event.REFUSED,
    Event.BROKEN,
    Event.TIMED_OUT,
    Event.UNREACHABLE,
}
QUESTIONS = {Event.PAUSE_SENT, Event.RESUME_SENT, Event.ASKED}
LOST = {State.LOST, State.DOWN}
PAUSED = {State.PAUSING, State.PAUSED, State.RESUMING}


def told(event, question=None, *, name="1", version=1):
    why = event.value if event in ANSWERS or event is Event.GIVEN_UP else None
    return Told(event, question, why=why, name=name, version=version)


def happenings(standing):
    """Every event that can happen to this server now: answers to the open question, answers to none, and the client's own."""
    for event in Event:
        if event in ANSWERS and standing.open is not None:
            yield told(event, standing.open, name="1")
            yield told(event, standing.open, name="2")
        if event not in ANSWERS or event in {Event.UNREACHABLE, Event.NOT_READY}:
            yield told(event)


def after(standing, *events):
    """The standing after these events; answers are given to the open question."""
    for event in events:
        standing, _ = step(standing, told(event, standing.open if event in ANSWERS else None))
    return standing


def tried(standing, news):
    try:
        return step(standing, news)[0]
    except IllegalTransition:
        return None


def seen(standing):
    """The standing without its count of questions, which grows for ever."""
    return attrs.evolve(standing, asked=0, open=None if standing.open is None else 1)


@attrs.frozen
class Place:
    """A standing that can be reached, the shortest way to it, and if the server may be paused by the client's own doing."""

    standing: Standing
    way: tuple[Told, ...] = ()
    paused: bool = False


def paused_after(place, news, standing):
    """If the server may be paused now, as told by what was sent and answered, without the table's own idea of it."""
    if not counts(place.standing, news):
        return place.paused
    if news.event in {Event.PAUSE_SENT, Event.FOUND_PAUSED}:
        return True
    over = {Event.RESUME_ANSWERED, Event.PROBED, Event.JOINED, Event.LEFT}
    return place.paused and news.event not in over


@cache
def reachable():
    """Every standing that some history leads to."""
    first = Place(Standing())
    places, found = deque([first]), {(seen(first.standing), False): first}
    while places:
        place = places.popleft()
        for news in happenings(place.standing):
            standing = tried(place.standing, news)
            if standing is None:
                continue
            paused = paused_after(place, news, standing)
            if (key := (seen(standing), paused)) not in found:
                found[key] = Place(standing, (*place.way, news), paused)
                places.append(found[key])
    return tuple(found.values())


def explain(place):
    return f"{place.standing} after {[news.event.name for news in place.way]}"


# --- states and events


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_in_the_table_or_refused_and_a_refused_event_changes_nothing(state, event):
    for standing in {place.standing for place in reachable() if place.standing.state is state}:
        news = told(event)
        if event in TRANSITIONS[state]:
            after, _ = step(standing, news)
            expected = TRANSITIONS[state][event]
            doubted = expected is State.READY and after.doubted
            assert after.state is (State.SUSPECT if doubted else expected)
        else:
            before = attrs.evolve(standing)
            with pytest.raises(IllegalTransition, match=f"{state.value} cannot {event.value}"):
                step(standing, news)
            assert standing == before


def test_every_state_is_reached():
    assert {place.standing.state for place in reachable()} == set(State) == set(TRANSITIONS)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


def test_the_states_and_their_data_agree_wherever_a_server_can_get():
    for place in reachable():
        standing = place.standing
        assert (standing.why is not None) == (standing.state in LOST), explain(place)
        assert not standing.must_resume or standing.state in LOST, explain(place)
        assert standing.state is not State.SUSPECT or standing.doubted, explain(place)
        assert standing.state is not State.READY or not standing.doubted, explain(place)
        assert standing.open is None or standing.open == standing.asked, explain(place)


# --- who gets requests


def test_no_state_gives_requests_to_a_server_that_may_be_paused_lacks_the_weights_or_is_in_a_window():
    for place in reachable():
        standing = place.standing
        if standing.usable:
            assert standing.state in {State.READY, State.SUSPECT}, explain(place)
            assert not place.paused, explain(place)
            assert not standing.window, explain(place)
            assert standing.weights.fit, explain(place)


def test_the_table_never_forgets_that_a_server_may_be_paused():
    for place in reachable():
        assert place.standing.may_be_paused or not place.paused, explain(place)


def test_a_lost_server_gets_no_requests_before_a_look_found_it_ready():
    for place in reachable():
        if place.standing.state in LOST:
            for news in happenings(place.standing):
                then = tried(place.standing, news)
                if then is not None and then.state not in LOST | {State.OUTSIDE}:
                    assert news.event in {Event.PROBED, Event.PAUSE_SENT}, explain(place)  # a window takes it over
                    assert news.event is Event.PAUSE_SENT or not place.standing.window, explain(place)


def test_no_pause_can_be_sent_while_a_resume_is_under_way_and_no_resume_while_a_pause_is():
    for state, refused in [
        (State.RESUMING, {Event.PAUSE_SENT, Event.RESUME_SENT, Event.ASKED}),
        (State.PAUSING, {Event.PAUSE_SENT, Event.RESUME_SENT, Event.ASKED}),
        (State.DOWN, {Event.PAUSE_SENT}),
    ]:
        assert not TRANSITIONS[state].keys() & refused


# --- late answers


def test_a_late_answer_never_changes_a_newer_questions_state():
    for place in reachable():
        standing = place.standing
        for event, question in itertools.product(ANSWERS, range(standing.asked + 1)):
            if question != standing.open:
                assert step(standing, told(event, question, name="7")) == (standing, ()), explain(place)


@pytest.mark.parametrize("event", [Event.WINDOW_BEGINS, Event.VERSION_REQUIRED])
@pytest.mark.parametrize("answer", [Event.PROBED, Event.NOT_READY, Event.VERSION_NAMED, Event.TIMED_OUT])
@pytest.mark.parametrize("state", [State.READY, State.SUSPECT, State.LOST, State.DOWN])
def test_a_window_and_a_newly_required_version_make_every_answer_late(state, event, answer):
    for place in reachable():
        if place.standing.state is state and place.standing.open is not None:
            then = after(place.standing, event)
            assert step(then, told(answer, place.standing.open, name="7")) == (then, ()), explain(place)


@pytest.mark.parametrize("event", [Event.WINDOW_BEGINS, Event.WINDOW_ENDS, Event.VERSION_REQUIRED, Event.DOUBTED])
def test_the_answer_to_a_pause_or_a_resume_counts_whatever_happens_meanwhile(event):
    pausing = after(Standing(), Event.JOINED, Event.PAUSE_SENT)
    paused, _ = step(after(pausing, event), told(Event.PAUSE_ANSWERED, pausing.open))
    assert paused.state is State.PAUSED
    resuming = after(paused, Event.RESUME_SENT)
    resumed, _ = step(after(resuming, event), told(Event.RESUME_ANSWERED, resuming.open))
    assert resumed.state in {State.READY, State.SUSPECT}


def test_a_look_in_a_window_brings_no_server_back():
    lost = after(Standing(), Event.JOINED, Event.UNREACHABLE, Event.WINDOW_BEGINS, Event.ASKED)
    assert step(lost, told(Event.PROBED, lost.open)) == (lost, ())
    assert step(lost, told(Event.NOT_READY, lost.open)) == (lost, ())


# --- out of a window


def served(standing):
    """Do what is due, with a server that answers everything well."""
    for _ in range(3):
        duty = due(standing)
        if duty is None:
            return standing
        sent, answer = {
            Effect.RESUME: (Event.RESUME_SENT, Event.RESUME_ANSWERED),
            Effect.LOOK: (Event.ASKED, Event.PROBED),
        }[duty]
        standing = after(standing, sent, answer)
    return standing


def test_every_paused_state_leads_to_ready_once_the_window_is_over_and_the_server_answers():
    for place in reachable():
        standing = place.standing
        if standing.state is not State.OUTSIDE:
            if standing.state is State.PAUSING:
                standing = after(standing, Event.PAUSE_ANSWERED)
            if standing.state is State.RESUMING:
                standing = after(standing, Event.RESUME_ANSWERED)
            then = served(after(standing, Event.WINDOW_ENDS))
            assert then.state is State.READY, explain(place)
            assert due(then) is None, explain(place)


@pytest.mark.parametrize("failure", [Event.REFUSED, Event.BROKEN, Event.TIMED_OUT, Event.UNREACHABLE])
def test_every_paused_state_leads_to_lost_or_to_another_try_if_the_server_does_not_answer(failure):
    for place in reachable():
        standing = place.standing
        if standing.state in {State.PAUSING, State.RESUMING}:
            then = after(standing, failure, Event.WINDOW_ENDS)
            assert then.state in LOST | {State.PAUSED}, explain(place)
            assert due(then) is Effect.RESUME, explain(place)


def test_in_a_window_nothing_is_due():
    for place in reachable():
        assert not place.standing.window or due(place.standing) is None, explain(place)


def test_whatever_gets_no_requests_outside_a_window_is_resumed_looked_at_or_waits_for_weights():
    for place in reachable():
        standing = place.standing
        if standing.window or standing.state in {State.OUTSIDE, State.PAUSING, State.RESUMING}:
            continue
        assert standing.usable or due(standing) is not None or not standing.weights.fit, explain(place)


# --- single stories


def test_a_pause_without_an_answer_is_remembered_until_the_server_is_found_ready():
    """The server carries the pause out after its resume: the look that finds it not ready has it resumed again."""
    lost = after(Standing(), Event.JOINED, Event.PAUSE_SENT, Event.BROKEN)
    assert (lost.state, lost.must_resume, lost.late_pause) == (State.LOST, True, True)
    resumed = after(lost, Event.RESUME_SENT, Event.RESUME_ANSWERED)
    assert (resumed.must_resume, due(resumed)) == (False, Effect.LOOK)
    carried_out = after(resumed, Event.ASKED, Event.NOT_READY)
    assert due(carried_out) is Effect.RESUME
    back = after(carried_out, Event.RESUME_SENT, Event.RESUME_ANSWERED, Event.ASKED, Event.PROBED)
    assert (back.state, back.late_pause) == (State.READY, False)


def test_a_server_that_another_client_paused_is_looked_at_and_never_resumed():
    lost = after(Standing(), Event.JOINED, Event.DOUBTED, Event.ASKED, Event.NOT_READY)
    assert (lost.state, due(lost)) == (State.LOST, Effect.LOOK)


def test_a_server_that_was_found_paused_joins_the_next_window_and_is_looked_at_until_then():
    found = after(Standing(), Event.JOINED, Event.NOT_READY)
    assert (found.state, found.found_paused, found.joins_windows, due(found)) == (State.LOST, True, True, Effect.LOOK)
    back = after(found, Event.ASKED, Event.PROBED)
    assert (back.state, back.found_paused) == (State.READY, False)
    down = after(found, Event.UNREACHABLE)
    assert (down.state, down.joins_windows) == (State.DOWN, False)


def test_a_server_that_refused_its_pause_is_in_no_window_until_it_has_another_version():
    ready, _ = step(after(Standing(), Event.JOINED), Told(Event.VERSION_REQUIRED, version=1))
    refused = after(ready, Event.WINDOW_BEGINS, Event.PAUSE_SENT, Event.REFUSED, Event.WINDOW_ENDS)
    back = served(refused)
    assert (back.state, back.usable, back.joins_windows) == (State.READY, False, False)
    required, _ = step(back, Told(Event.VERSION_REQUIRED, version=2))
    assert (required.usable, required.joins_windows, due(required)) == (False, False, Effect.LOOK)
    asked = after(required, Event.ASKED)
    behind, _ = step(asked, told(Event.PROBED, asked.open, name="1"))
    assert (behind.usable, behind.joins_windows) == (False, False)
    brought, _ = step(asked, told(Event.PROBED, asked.open, name="2"))
    assert (brought.usable, brought.joins_windows) == (True, True)


def test_a_pause_that_was_refused_is_not_expected_any_more():
    lost = after(Standing(), Event.JOINED, Event.PAUSE_SENT, Event.REFUSED)
    assert (lost.must_resume, lost.late_pause) == (True, False)


def test_a_version_that_is_required_while_a_server_is_paused_is_looked_for_once_it_is_resumed():
    behind, _ = step(Standing(), told(Event.JOINED, name="1"))
    paused = after(behind, Event.WINDOW_BEGINS, Event.PAUSE_SENT, Event.PAUSE_ANSWERED)
    required, _ = step(paused, Told(Event.VERSION_REQUIRED, version=2))
    resumed = after(required, Event.RESUME_SENT, Event.RESUME_ANSWERED)
    assert (resumed.state, resumed.weights.fit) == (State.SUSPECT, False)


def test_a_server_whose_resume_was_cut_short_is_looked_at_once_the_probe_has_resumed_it():
    paused = after(Standing(), Event.JOINED, Event.WINDOW_BEGINS, Event.PAUSE_SENT, Event.PAUSE_ANSWERED)
    in_time = after(paused, Event.RESUME_SENT, Event.RESUME_ANSWERED, Event.WINDOW_ENDS)
    assert (in_time.state, due(in_time)) == (State.READY, None)
    cut_short = after(paused, Event.WINDOW_ENDS)
    assert due(cut_short) is Effect.RESUME
    assert due(after(cut_short, Event.RESUME_SENT, Event.RESUME_ANSWERED)) is Effect.LOOK


def test_the_first_reason_for_a_loss_is_kept():
    lost, _ = step(after(Standing(), Event.JOINED), Told(Event.UNREACHABLE, why="refused"))
    again, effects = step(lost, Told(Event.UNREACHABLE, why="no answer"))
    assert (again.why, Effect.REPORT_LOST in effects) == ("refused", False)


def test_a_server_that_was_left_is_over():
    for place in reachable():
        left = after(place.standing, Event.LEFT)
        assert (left.state, left.usable, due(left)) == (State.OUTSIDE, False, None)


# --- effects


def test_requests_are_woken_whenever_a_server_becomes_usable():
    for place in reachable():
        for news in happenings(place.standing):
            try:
                then, effects = step(place.standing, news)
            except IllegalTransition:
                continue
            if then.usable and not place.standing.usable:
                assert Effect.WAKE in effects, explain(place)
            if then.samples and not place.standing.samples:
                assert Effect.PAY in effects, explain(place)
            if counts(place.standing, news):
                assert (Effect.LET_GO in effects) == (news.event is Event.PAUSE_SENT), explain(place)
                assert (due(then) in effects) == (due(then) is not None), explain(place)


def test_a_loss_and_a_return_are_each_reported_once():
    ready = after(Standing(), Event.JOINED)
    lost, effects = step(ready, told(Event.UNREACHABLE))
    assert Effect.REPORT_LOST in effects
    _, effects = step(lost, told(Event.UNREACHABLE))
    assert Effect.REPORT_LOST not in effects
    asked = after(lost, Event.ASKED)
    back, effects = step(asked, told(Event.PROBED, asked.open))
    assert Effect.REPORT_BACK in effects
    suspect = after(back, Event.DOUBTED, Event.ASKED)
    _, effects = step(suspect, told(Event.PROBED, suspect.open))
    assert Effect.REPORT_BACK not in effects


def test_a_server_that_is_found_with_other_weights_is_reported():
    asked = after(Standing(), Event.JOINED, Event.VERSION_REQUIRED, Event.DOUBTED, Event.ASKED)
    _, effects = step(asked, told(Event.PROBED, asked.open, name="0"))
    assert Effect.REPORT_OUTDATED in effects


# --- names of weights


def test_names_that_are_numbers_are_believed():
    assert Weights().named("7").number == 7
    assert Weights().named(8).number == 8
    assert Weights().version_of("6", Named("default", 0)) == 6


def test_a_server_that_names_no_number_is_taken_at_the_trainers_word():
    before = Weights().named("default")
    weights = before.require(5)

    assert weights.named("default").number is None
    assert weights.named("default").now.version == 5
    assert weights.version_of("default", weights.now) == 5
    assert weights.version_of("default", before.now) == 0  # its name did not change over the update: the older version
    assert weights.fit


def test_names_that_change_stand_for_the_version_they_were_required_as():
    before = Weights().named("w0")
    weights = before.named("w1").require(1)

    assert weights.version_of("w0", before.now) == 0
    assert weights.version_of("w1", before.now) == 1


def test_default_after_numbers_is_a_restart():
    weights = Weights().named("7").named("default")

    assert weights.number == 0
    assert weights.version_of("default", Named("7", 7)) == 0


@pytest.mark.parametrize("word", ["default", "base", None])
def test_a_word_after_the_numbers_of_an_earlier_run_is_other_weights(word):
    """As inside one run, where a server that named numbers and names none any more gets no work until a weight update."""
    fresh = Weights().named(word)
    assert not fresh.require(5, Past.NUMBERS).fit
    assert not fresh.require(5, Past.OTHERS).fit
    assert fresh.require(5).fit
    assert not Weights().named("5").require(5).named(word).fit
    assert (
        fresh.require(5, Past.OTHERS).require(6).fit
    )  # taken at the trainer's word, like one that never named a number
    assert fresh.named("5").require(5, Past.NUMBERS).fit


@given(st.lists(st.sampled_from(["default", "1", "2", "w1", "w2", None, 3]) | st.integers(0, 5), max_size=30))
def test_weights_forget_old_names_and_never_fail(history):
    weights = Weights()
    for item in history:
        weights = weights.require(item) if isinstance(item, int) else weights.named(item)
    assert isinstance(weights.version_of("never heard of", weights.now), int)
    assert len(weights.known) <= 16
