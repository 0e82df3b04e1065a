"""Failures that repeat are told once and then counted; a scorer that fails alike is not asked again."""

import pytest

from trio_rollout import Retry
from trio_rollout._core.failure_log import FailureLog, ScorerTries
from trio_rollout._core.failures import failure_of


def raise_it(error):
    raise error


def failure(error):
    with pytest.raises(type(error)) as caught:
        raise_it(error)
    return failure_of(caught.value)


def test_f105_a_failure_that_repeats_is_told_in_full_once_and_then_counted():
    log = FailureLog()
    texts = [log.text_for("reward", failure(KeyError(f"answer {number}"))) for number in range(20)]
    told = {number: text for number, text in enumerate(texts, 1) if text is not None}
    assert list(told) == [1, 2, 4, 8, 16]
    assert "Traceback" in told[1]
    assert told[16] == "error: KeyError: 'answer 15' (x 16 so far)"


def test_f105_failures_of_other_kinds_are_told_apart():
    log = FailureLog()
    assert log.text_for("reward", failure(KeyError("a")))
    assert "Traceback" in log.text_for("group reward", failure(KeyError("a")))
    assert "Traceback" in log.text_for("reward", failure(ValueError("a")))


def test_f105_the_log_forgets_the_kind_that_was_met_longest_ago():
    log = FailureLog()
    for number in range(300):
        assert log.text_for(f"work {number}", failure(KeyError("a"))).endswith("KeyError: 'a'")
        assert len(log._counts) <= 256


def test_f105_a_scorer_that_fails_alike_twice_in_a_row_is_not_asked_again():
    tries = ScorerTries(Retry(max_attempts=9))
    assert tries.after(failure(KeyError("a")), counts=True) == 1
    assert tries.after(failure(KeyError("b")), counts=True) == 2
    assert tries.after(failure(ValueError("b")), counts=True) == 3
    assert tries.after(failure(ValueError("b")), counts=True) is None


def test_f105_the_tries_of_a_scorer_are_used_up():
    tries = ScorerTries(Retry(max_attempts=3))
    assert [tries.after(failure(KeyError(number)), counts=True) for number in range(3)] == [1, 2, None]


def test_f105_infrastructure_uses_up_none_of_the_tries_and_is_bounded_by_itself():
    tries = ScorerTries(Retry(max_attempts=2, max_free=10))
    lost = failure(ConnectionError("reset"))
    assert [tries.after(lost, counts=False) for _ in range(11)] == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, None]
    assert tries.used == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("no running event loop"), "asyncio_reward(fn, bridge=...)"),
        (RuntimeError("There is no current event loop in thread 'score'."), "asyncio_reward(fn, bridge=...)"),
        (ValueError("signal only works in main thread of the main interpreter"), "in_process(fn)"),
    ],
)
def test_f104_f107_a_message_that_does_not_help_gets_advice(error, words):
    assert failure_of(error).message.startswith(f"{error}. ")
    assert words in failure_of(error).message
    assert failure_of(LookupError(str(error))).message == str(LookupError(str(error)))
