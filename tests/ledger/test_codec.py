"""Every value comes back equal; data that can't be stored is refused with the prompt and the key."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trio_rollout._core.enums import Cause, Status, Stop
from trio_rollout._core.sampling import SamplingParams
from trio_rollout._core.values import Failure, Group, GroupId, Prompt, Segment, Trajectory, VersionSpan
from trio_rollout.errors import DataRefused
from trio_rollout.ledger._codec import (
    decode_failure,
    decode_group,
    decode_prompt,
    decode_sample,
    encode_failure,
    encode_group,
    encode_prompt,
    encode_sample,
    prompt_of_group,
)

from ._samples import group, prompt

any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates included
json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
finite_data = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text
metadata = st.dictionaries(st.text(max_size=3), json_data, max_size=2)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens = draw(ids)
    response = draw(st.integers(0, len(tokens)))
    return Segment(
        tokens=tokens,
        response_length=response,
        loss_mask=draw(st.lists(st.integers(0, 1), min_size=response, max_size=response)),
        log_probs=draw(st.lists(st.floats(-1e3, 0, width=32), min_size=response, max_size=response)),
        versions=[VersionSpan(0, response, draw(st.integers(0, 2**40)))],
        text=draw(any_text),
    )


prompts = st.builds(
    Prompt,
    id=any_text,
    input_ids=ids,
    label=json_data,
    metadata=metadata,
    extra=metadata,
    epoch=st.integers(0, 2**40),
    sampling=st.none()
    | st.builds(
        SamplingParams,
        stop=st.lists(st.text(st.characters(exclude_categories=()), min_size=1)),
        extra=st.dictionaries(st.text(max_size=3), finite_data, max_size=2).filter(lambda extra: "n" not in extra),
        sampling_seed=st.integers(-(2**63), 2**63 - 1),
    ),
)
failures = st.builds(Failure, cause=st.sampled_from(Cause), type=any_text, message=any_text, traceback=any_text)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    of = draw(prompts)
    rows = st.builds(
        Trajectory,
        prompt=st.just(of) | prompts,
        index=st.integers(0, 9),
        segments=st.lists(segments(), max_size=2),
        status=st.sampled_from(Status),
        stop=st.sampled_from(Stop),
        reward=st.none() | st.floats(allow_nan=False) | st.dictionaries(st.text(), st.floats(allow_nan=False)),
        metadata=metadata,
        error=st.none() | failures,
    )
    return Group(
        id=of.group_id, attempt=draw(st.integers(1, 9)), prompt=of, trajectories=draw(st.lists(rows, max_size=2))
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(groups())
def test_groups_come_back_equal(value: Group):
    assert decode_group(encode_group(value)) == value
    assert decode_prompt(prompt_of_group(encode_group(value))) == value.prompt


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(groups())
def test_samples_come_back_equal_with_the_prompt_of_their_group(value: Group):
    for row in value.trajectories:
        assert decode_sample(encode_sample(value.id, row), row.prompt) == row


@given(failures)
def test_failures_come_back_equal(value: Failure):
    assert decode_failure(encode_failure(value)) == value


@pytest.mark.parametrize(
    "given_as",
    [
        {"text": "hello \ud83d"},
        {"messages": [{"role": "user", "content": ["a", {"b": 1}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_prompts_of_every_kind_come_back_equal(given_as: dict[str, Any]):
    value = Prompt(id="p", **given_as)
    assert decode_prompt(encode_prompt(value)) == value


def test_prompts_of_a_group_are_stored_once():
    """Trajectories share their group's prompt, also when user code gave them an equal copy."""
    value = group(1, samples=2)
    again = decode_group(encode_group(value))
    assert all(row.prompt is again.prompt for row in again.trajectories)


def test_arrays_come_back_read_only_and_of_their_type():
    of = prompt(1)
    extras = {
        "experts": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
        "half": np.array([0.5], np.float16),
        "empty": np.empty((0, 3)),
        "scalar": np.array(3.0),
        "names": np.array(["a", "bc"]),
    }
    row = Segment(tokens=[1], response_length=0, loss_mask=[], log_probs=[], versions=[], extras=extras)
    value = Group(id=of.group_id, attempt=1, prompt=of, trajectories=[Trajectory(prompt=of, index=0, segments=[row])])
    again = decode_group(encode_group(value)).trajectories[0].segments[0]
    assert again.extras.keys() == extras.keys()
    for name, array in extras.items():
        assert again.extras[name].dtype == array.dtype
        assert np.array_equal(again.extras[name], array)
        assert not again.extras[name].flags.writeable
    assert not again.tokens.flags.writeable


def test_numbers_of_numpy_and_tuples_are_taken_for_what_they_mean():
    """User code computes with numpy; a good group is not lost over a float32."""
    found = decode_prompt(
        encode_prompt(
            Prompt(
                id="p",
                text="x",
                label=np.int64(3),
                metadata={"a": np.float32(0.5), "b": (1, 2), "c": np.bool_(True), "d": {1: "one"}, "e": np.arange(2)},  # ruff: ignore[boolean-positional-value-in-call]
            )
        )
    )
    assert found.label == 3
    assert np.array_equal(found.metadata.pop("e"), [0, 1])
    assert found.metadata == {"a": 0.5, "b": [1, 2], "c": True, "d": {1: "one"}}
    assert json.dumps(found.metadata)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"judge": {"raw": [1, object()]}}, r"metadata\['judge'\]\['raw'\]\[1\]: a value of type object"),
        ({"seen": {1, 2}}, r"metadata\['seen'\]: a value of type set"),
        ({"blob": b"\0"}, r"metadata\['blob'\]: a value of type bytes"),
        ({"when": np.datetime64("2026-01-01")}, r"metadata\['when'\]: a number of dtype"),
        ({("a", 1): 2}, r"metadata\[\('a', 1\)\]: the key"),
        ({"array": np.array([object()])}, r"metadata\['array'\]: an array of dtype object"),
    ],
)
def test_data_that_can_not_be_stored_is_named(value: dict[Any, Any], where: str):
    with pytest.raises(DataRefused, match=rf"prompt 0/p7 can't be written to the ledger: {where}"):
        encode_prompt(Prompt(id="p7", text="x", metadata=value))
    of = prompt(7)
    bad = Trajectory(prompt=of, index=0, segments=[], metadata=value)
    with pytest.raises(DataRefused, match=rf"group 0/7 can't be written to the ledger: trajectories\[1\]\.{where}"):
        encode_group(Group(id=GroupId(0, "7"), attempt=1, prompt=of, trajectories=[*group(7).trajectories, bad]))


def test_a_cycle_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(DataRefused, match="nested deeper than 200 levels"):
        encode_prompt(Prompt(id="p", text="x", label=loop))
