"""Sampling parameters that no server takes, or that mean something else on their way, are refused when they are given."""

import math

import attrs
import numpy as np
import pytest

from trio_rollout import SamplingParams
from trio_rollout._core.arrays import ID_MAX
from trio_rollout._core.sampling import FURTHER, NAMED, check_finite, with_most_tokens
from trio_rollout.errors import SettingsError

NUMBERS = [math.inf, -math.inf, math.nan, -1, True, "1", None, [1], np.float64("inf"), np.float32("nan")]
WHOLE = [2.5, 2.0, 1e3, math.inf, math.nan, True, "5", None, ID_MAX + 1, 2**70, np.float64(2), [5]]
TEXTS = ["", ["a", ""], ["a", None], [None], [7], 7, b"a", [b"a"], ["a", ["b"]], {"a": ""} | {"": 1}, True]
BAD = {
    "max_new_tokens": [*WHOLE, -1],
    "temperature": [*NUMBERS, -0.001],
    "top_p": [*NUMBERS, 0, 1.001],
    "top_k": [*WHOLE, 0, -2, 1.5, -1.0],
    "min_p": [*NUMBERS, 1.001],
    "stop": TEXTS,
    "stop_token_ids": [[-1], [2**31], [1.5], [None], ["a"], [True], 7, "12", [math.nan], [1e9]],
    "ignore_eos": [1, 0, "yes", None],
    "skip_special_tokens": [1, 0, "yes", None],
    "sampling_seed": [1.5, "1", True, 2**63, -(2**63) - 1, math.inf],
}
BAD_FURTHER = {
    "min_new_tokens": [-1, 1.5, True, "1"],
    "frequency_penalty": [2.1, -2.1, math.inf, "1", True],
    "presence_penalty": [2.1, -2.1, math.nan],
    "repetition_penalty": [0, 2.1, -1, math.inf],
    "stop_regex": ["", "(", ["a", ""], [None], 7],
    "logit_bias": [{"x": 1.0}, {5: 1.0}, {"5": math.inf}, {"5": None}, {"-5": 1}, [1]],
    "n": [0, 2, 1.0, True, "1"],
    "beam_width": [0, -1, 1.5],
    "stream_interval": [0, 1.5],
    "no_stop_trim": [1, "x"],
    "spaces_between_special_tokens": [0],
    "json_schema": [{"type": "object"}, 7],
    "regex": [7],
    "ebnf": [7],
    "structural_tag": [7],
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


def test_f114_every_parameter_with_a_range_has_bad_values_here():
    assert BAD.keys() == NAMED.keys()
    assert BAD_FURTHER.keys() == FURTHER.keys()
    assert {field.name for field in attrs.fields(SamplingParams)} - {"extra"} == NAMED.keys()


@pytest.mark.parametrize(("name", "value"), CASES, ids=repr)
@pytest.mark.parametrize("way", ["field", "extra", "evolve"])
def test_f114_a_value_out_of_its_range_is_refused_with_field_value_and_range(name, value, way):
    with pytest.raises(SettingsError) as caught:
        if way == "field":
            SamplingParams(**{name: value})
        elif way == "extra":
            SamplingParams(extra={name: value})
        else:
            attrs.evolve(SamplingParams(), **{name: value})
    message = str(caught.value)
    assert name in message
    assert "got" in message
    assert NAMED[name].allowed in message


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_FURTHER.items() for value in values], ids=repr
)
def test_f114_the_further_parameters_are_checked_too(name, value):
    with pytest.raises(SettingsError, match=rf"extra.*{name}.*got.*allowed"):
        SamplingParams(extra={name: value})


@pytest.mark.parametrize(
    "extra",
    [
        {"custom_params": {"a": [1.0, math.nan]}},
        {"unknown": math.inf},
        {"unknown": np.array([1.0, np.inf])},
        {"unknown": ({"a": np.float32("nan")},)},
    ],
    ids=repr,
)
def test_f114_a_number_that_would_be_sent_as_null_is_refused_at_any_depth(extra):
    with pytest.raises(SettingsError, match=r"extra\[.*got.*finite"):
        SamplingParams(extra=extra)


@pytest.mark.parametrize("extra", [None, 7, [1], {1: 2}, {None: 1}])
def test_f114_extra_is_a_mapping_by_names(extra):
    with pytest.raises(SettingsError, match="extra: got"):
        SamplingParams(extra=extra)


def test_f114_good_values_stay_and_those_of_other_types_are_converted():
    params = SamplingParams(
        max_new_tokens=np.int64(5),
        temperature=1,
        top_p=np.float32(0.5),
        top_k=np.int32(7),
        stop="x",
        stop_token_ids=np.array([1, 2]),
        ignore_eos=np.bool_(1),
        extra={"min_new_tokens": None, "logit_bias": {"5": -1}, "lora": {"a": [1, None]}},
    )
    assert params.max_new_tokens == 5
    assert type(params.max_new_tokens) is int
    assert type(params.temperature) is float
    assert (params.top_p, params.top_k, params.stop, params.stop_token_ids) == (0.5, 7, ("x",), (1, 2))
    assert params.ignore_eos is True
    assert SamplingParams(top_k=-1, temperature=0, max_new_tokens=0, stop=None, stop_token_ids=None) == SamplingParams(
        temperature=0.0, max_new_tokens=0
    )


def test_f114_a_field_among_the_extras_replaces_the_field():
    """So it is checked as one, and counts wherever the field does."""
    params = SamplingParams(max_new_tokens=100, extra={"max_new_tokens": 3, "stop": "a", "regex": "x"})
    assert (params.max_new_tokens, params.stop, params.extra) == (3, ("a",), {"regex": "x"})


def test_f114_the_rest_of_an_answer_needs_no_more_tokens_than_it_may_have():
    """``min_new_tokens`` above ``max_new_tokens`` is refused by a server."""
    params = SamplingParams(max_new_tokens=100, extra={"min_new_tokens": 80, "regex": "x"})
    rest = with_most_tokens(params, 40, sampled=60)
    assert (rest.max_new_tokens, rest.extra) == (40, {"min_new_tokens": 20, "regex": "x"})
    assert with_most_tokens(params, 10).extra["min_new_tokens"] == 10
    assert with_most_tokens(params, 5, sampled=95).extra["min_new_tokens"] == 0


def test_f114_finite_numbers_of_any_kind_pass():
    check_finite({"a": [1, 2.5, np.float32(3), np.arange(3), np.ones(2), None, "inf", True]}, "x")
