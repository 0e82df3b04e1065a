"""The log of a sample's turns: what is left to give back, what ends that, and the tokens of both parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout import Cause, Stop, Turn, VersionSpan
from trio_rollout._core.turn_log import RecordedTurn, TurnLog


def turn(tokens=2, version=0, prompt=(1, 2)):
    return Turn(
        rid="r",
        prompt_ids=prompt,
        output_ids=[5] * tokens,
        log_probs=[-0.5] * tokens,
        text="t",
        stop=Stop.STOP,
        weight_version=version,
        versions=[VersionSpan(0, tokens, version)],
    )


def log_of(*requests, beside=None):
    """Return the log of a try that sampled these requests, and ended."""
    log = TurnLog()
    for place, request in enumerate(requests):
        log.add(request, [1, 2], turn(), beside=(beside or {}).get(place, 0))
    log.rewind(Cause.SERVER_LOST)
    return log


def asked(log, *requests):
    """Ask for these; return the numbers of the records that came back, None for a request without an answer."""
    numbers = []
    for request in requests:
        record = log.give_back(request)
        if record is None:
            log.note_unanswered()
        numbers.append(None if record is None else record.number)
    return numbers


def test_turns_come_back_once_a_try_and_again_in_the_next():
    log = log_of(b"a", b"b")
    assert asked(log, b"a", b"b", b"a") == [0, 1, None]
    log.rewind(Cause.SERVER_LOST)
    assert asked(log, b"a") == [0]


def test_of_equal_requests_the_oldest_answer_comes_first():
    assert asked(log_of(b"a", b"a", b"b"), b"a", b"b", b"a") == [0, 2, 1]


def test_the_first_request_without_an_answer_ends_the_replay_for_good():
    log = log_of(b"a", b"b", b"c")
    assert asked(log, b"a", b"x", b"b", b"c") == [0, None, None, None]
    assert not log.is_replaying
    log.rewind(Cause.SERVER_LOST)
    assert asked(log, b"a", b"b") == [0, None]


@pytest.mark.parametrize(("beside", "found"), [(0, None), (1, 1)])
def test_requests_that_were_under_way_beside_a_turn_may_have_no_answer(beside, found):
    log = log_of(b"a", b"b", b"c", beside={1: beside})
    assert asked(log, b"a", b"x", b"b") == [0, None, found]
    assert asked(log, b"y", b"c") == [None, None]


def test_a_request_that_can_not_be_known_has_no_answer():
    assert asked(log_of(b"a"), None) == [None]


def test_what_a_try_adds_comes_back_in_the_next_one_only():
    log = log_of(b"a")
    asked(log, b"a")
    log.add(b"b", [1, 2], turn(), beside=0)
    assert not log.is_replaying
    assert log.give_back(b"b") is None
    log.rewind(Cause.SERVER_LOST)
    assert asked(log, b"a", b"b") == [0, 1]


def test_numbers_go_on_behind_those_of_an_earlier_life():
    log = TurnLog([RecordedTurn(number=4, request=b"a", turn=turn())])
    assert log.add(b"b", [1, 2], turn(), beside=0).number == 5
    assert log.cause is Cause.SHUTDOWN
    assert asked(log, b"a") == [4]


def test_a_prompt_that_is_the_requests_is_left_out_and_comes_back():
    log = TurnLog()
    same, other = log.add(b"a", [1, 2], turn(), beside=0), log.add(b"b", "text", turn(), beside=0)
    assert (len(same.turn.prompt_ids), list(other.turn.prompt_ids)) == (0, [1, 2])
    assert same.answer_to([1, 2]) == turn()
    assert other.answer_to("text") == turn()


def test_the_oldest_version_is_that_of_any_token():
    log = TurnLog()
    assert log.oldest_version is None
    log.add(b"a", [1, 2], turn(version=3), beside=0)
    log.add(b"b", [1, 2], turn(tokens=0, version=2), beside=0)
    assert log.oldest_version == 2


@given(st.lists(st.tuples(st.sampled_from(["ask", "add", "rewind", "drop"]), st.integers(0, 3), st.integers(0, 4))))
def test_every_token_is_left_or_of_the_try_or_dropped(steps):
    """Between any two steps, and each once."""
    log, added, dropped = TurnLog(), 0, 0
    for step, request, tokens in steps:
        name = bytes([request])
        if step == "add":
            log.add(name, [1, 2], turn(tokens), beside=request % 2)
            added += tokens
        elif step == "ask" and log.give_back(name) is None:
            dropped += sum(record.tokens for record in log.note_unanswered())
        elif step == "drop":
            dropped += sum(record.tokens for record in log.drop_left())
        elif step == "rewind":
            log.rewind(Cause.DEADLINE)
            assert log.tokens_of_try == 0
        assert min(log.tokens_left, log.tokens_of_try) >= 0
        assert log.tokens_left + log.tokens_of_try + dropped == added
    dropped += sum(record.tokens for record in log.drop_all())
    assert (dropped, len(log), log.is_replaying) == (added, 0, False)
