"""Values refuse mistakes that would show too late: wrong lengths, wrong ids, several inputs."""

import pickle

import numpy as np
import pytest

import trio_rollout.errors
from trio_rollout import (
    Batch,
    Cause,
    Deadlines,
    EngineSettings,
    Failure,
    Group,
    Prompt,
    Retry,
    SamplingParams,
    Segment,
    Staleness,
    Stop,
    Trajectory,
    Turn,
    VersionSpan,
)
from trio_rollout._core.book import Book
from trio_rollout._core.failures import failure_of
from trio_rollout._core.statistics import Counts
from trio_rollout.errors import FailedElsewhere, RequestRejected, RolloutError, ServerBusy, ServerLost, SettingsError


def segment(**changes):
    fields = {
        "tokens": [1, 2, 3],
        "response_length": 2,
        "loss_mask": [1, 1],
        "log_probs": [-0.1, -0.2],
        "versions": [(0, 2, 0)],
    }
    return Segment(**{**fields, **changes})


@pytest.mark.parametrize(
    "change", [{"loss_mask": [1]}, {"log_probs": [-0.1]}, {"response_length": 4}, {"response_length": -1}]
)
def test_f073_arrays_of_different_length_are_refused(change):
    with pytest.raises(ValueError, match="segment"):
        segment(**change)


def test_f071_a_turn_with_fewer_log_probs_than_ids_is_refused():
    with pytest.raises(ValueError, match="3 output ids but 2 log-probs"):
        Turn(
            rid="r",
            prompt_ids=[1],
            output_ids=[1, 2, 3],
            log_probs=[-1.0, -2.0],
            text="",
            stop=Stop.STOP,
            weight_version=0,
            versions=[],
        )


def test_arrays_are_read_only_and_their_writable_originals_stay_the_callers():
    mine = np.array([1, 2, 3], np.int32)[:]
    prompt = Prompt(id="p", input_ids=mine)
    mine[0] = 9
    assert prompt.input_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        prompt.input_ids[0] = 5


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "exactly one"),
        ({"text": "a", "input_ids": [1]}, "exactly one"),
        ({"text": ""}, "empty"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [-1]}, "-1"),
        ({"input_ids": [2**31]}, str(2**31)),
        ({"input_ids": [[1]]}, "dimensions"),
    ],
)
def test_a_prompt_has_one_input(inputs, message):
    with pytest.raises(ValueError, match=message):
        Prompt(id="p", **inputs)


@pytest.mark.parametrize("ids", [["a"], [1.5], [True, None]])
def test_token_ids_are_integers(ids):
    with pytest.raises(TypeError, match="integers"):
        Prompt(id="p", input_ids=ids)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SamplingParams(temperature=-1), "temperature"),
        (lambda: SamplingParams(top_p=0), "top_p"),
        (lambda: SamplingParams(max_new_tokens=-1), "max_new_tokens"),
        (lambda: Retry(max_attempts=0), "max_attempts"),
        (lambda: Retry(jitter=2), "jitter"),
        (lambda: Staleness(max_versions=-1), "max_versions"),
        (lambda: EngineSettings(max_ready=0), "max_ready"),
        (lambda: EngineSettings(samples_per_prompt=True), "samples_per_prompt"),
        (lambda: Deadlines(abort=30, drain=30), "abort"),
        (lambda: Deadlines(abort=0), "abort"),
        (lambda: Deadlines(group="None"), "group"),
        (lambda: Deadlines(turn=float("nan")), "turn"),
    ],
)
def test_settings_out_of_range_name_the_field_the_value_and_the_range(make, field):
    with pytest.raises(SettingsError, match=rf"{field}: got .*allowed"):
        make()


@pytest.mark.parametrize(
    "name", [name for name in vars(trio_rollout.errors) if name[0].isupper() and name != "TYPE_CHECKING"]
)
def test_every_error_can_be_pickled(name):
    error = getattr(trio_rollout.errors, name)("what was tried, the limit, the value")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args) == (type(error), error.args)
    assert isinstance(again, RolloutError)


def test_what_an_error_carries_survives_pickling():
    failure = Failure(cause=Cause.DEADLINE, type="", message="too late")
    for error in (
        RequestRejected("m", status=400),
        ServerBusy("m", status=503, retry_after=2.0),
        ServerLost("m"),
        FailedElsewhere("m", failure=failure),
    ):
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_what_a_failure_says_has_a_bound():
    failure = failure_of(ValueError("a" * 10**6 + "z"))
    assert len(failure.message) < 20_000
    assert len(failure.traceback) < 20_000
    assert failure.message.startswith("aaa")
    assert failure.message.endswith("z")
    assert "983617 characters are left out" in failure.message


def test_f169_a_repr_holds_no_array_and_no_long_text():
    """A batch in a log is a line, however long its rollouts were."""
    many, text = 100_000, "a" * 100_000
    ids, mask = np.arange(many), np.ones(many)
    prompt = Prompt(id="p", input_ids=ids, label=text, metadata={"text": text, "list": [text] * many}, extra={"x": ids})
    spans = [VersionSpan(n, n + 1, n) for n in range(many)]
    segment = Segment(
        tokens=ids, response_length=many, loss_mask=mask, log_probs=-mask, versions=spans, text=text, extras={"e": ids}
    )
    turn = Turn(
        rid="r", prompt_ids=ids, output_ids=ids, log_probs=-mask, text=text, stop=Stop.STOP, weight_version=0,
        versions=spans, meta_info={"x": text}, extras={"e": ids},
    )  # fmt: skip
    row = Trajectory(prompt=prompt, index=0, segments=[segment] * 9, metadata={"x": text})
    group = Group(id=prompt.group_id, attempt=1, prompt=prompt, trajectories=[row] * 64)
    batch = Batch(id="b", step=3, groups=(group,) * 64, statistics=None, redelivered=False, ack=None)
    messages = Prompt(id="p", messages=[{"role": "user", "content": text}] * many, tools=[{"x": text}] * many)

    for value in (prompt, messages, segment, turn, row, group, batch):
        assert len(repr(value)) < 1500
        assert "\n" not in repr(value)
    assert repr(batch) == "Batch(id='b', step=3, groups=<64>, redelivered=False)"
    assert "tokens=<100000 int32>" in repr(segment)
    assert repr(Prompt(id="p", text="hi", label=1)).startswith(
        "Prompt(id='p', input_ids=None, text='hi', messages=None, label=1"
    )


def test_f169_counts_by_cause_are_shown_where_there_are_any():
    counts = Counts(dict.fromkeys(Cause, 0) | {Cause.DEADLINE: 2})
    assert repr(counts) == "{deadline: 2}"
    assert counts[Cause.STALE] == 0
    assert repr(Book().requeues) == "{}"
