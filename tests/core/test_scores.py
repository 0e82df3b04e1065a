"""Values that a reward function may return, and values that are refused."""

import decimal
import fractions
import math

import attrs
import numpy as np
import pytest

from trio_rollout._core.scores import require_alike, score_of, scores_of
from trio_rollout.errors import RewardError


@attrs.frozen
class Tensor:
    """A tensor of torch or jax, as far as it matters here: dimensions, ``item`` and ``tolist``."""

    values: list

    @property
    def ndim(self):
        return 1

    def item(self):
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.values[0]

    def tolist(self):
        return list(self.values)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (np.bool_(1), 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (np.array([2]), 2.0),
        (np.array([[True]]), 1.0),
        (Tensor([0.5]), 0.5),
        (decimal.Decimal("0.5"), 0.5),
        (fractions.Fraction(1, 4), 0.25),
        ({"right": np.bool_(0), "short": np.array([0.5])}, {"right": 0.0, "short": 0.5}),
    ],
)
def test_f106_what_says_that_it_is_a_number_is_one(value, score):
    found = score_of(value, "reward")
    assert found == score
    numbers = found.values() if isinstance(found, dict) else [found]
    assert all(type(number) is float for number in numbers)


@pytest.mark.parametrize(
    "value",
    [
        None, math.nan, math.inf, np.float32("nan"), "0.5", b"10", bytearray(b"1"), np.str_("1"), np.bytes_(b"1"), [1.0], (1.0,),
        np.array([1.0, 2.0]), np.array([]), np.array(None), Tensor([1, 2]), 1j, np.complex128(1), float, 10**400,
        decimal.Decimal("sNaN"), {"a": None}, {"a": b"1"}, {"a": 10**400},
    ],
)  # fmt: skip
def test_f106_what_is_no_finite_number_is_refused_by_the_rewards_name(value):
    with pytest.raises(RewardError, match=r"^reward of rollout 3.*: a finite number wanted, got "):
        score_of(value, "reward of rollout 3")


def test_f106_the_error_shows_the_beginning_of_a_long_value():
    with pytest.raises(RewardError, match=r"got int 1000.* [.]{3}: int too large"):
        score_of(10**400, "reward")


def test_f106_a_mapping_needs_names_that_differ():
    with pytest.raises(RewardError, match=r"at least one number by name wanted, got \{\}"):
        score_of({}, "reward")
    with pytest.raises(RewardError, match="names must differ as text"):
        score_of({1: 0.0, "1": 1.0}, "reward")


@pytest.mark.parametrize(
    "values", [[0.5, 1], (0.5, True), np.array([0.5, 1.0]), np.array([0.5, 1], dtype=object), Tensor([0.5, 1.0])]
)
def test_f106_a_sequence_or_an_array_with_one_dimension_is_a_group_reward(values):
    assert scores_of(values, 2, "group reward", str) == [0.5, 1.0]


@pytest.mark.parametrize(
    "values",
    [
        b"10",
        "10",
        bytearray(b"10"),
        memoryview(b"10"),
        [1.0],
        np.array([1.0]),
        np.array([[1.0], [2.0]]),
        np.array(1.0),
        {0: 1, 1: 2},
        None,
        1.0,
    ],
)
def test_f106_text_bytes_and_other_lengths_are_no_group_reward(values):
    with pytest.raises(RewardError, match=r"^group reward of g: 2 rewards wanted, got "):
        scores_of(values, 2, "group reward of g", str)


def test_f106_one_bad_reward_of_a_group_is_named():
    with pytest.raises(RewardError, match=r"^number 1: a finite number wanted, got NoneType"):
        scores_of([1.0, None], 2, "group reward", lambda index: f"number {index}")


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"a": 1.0}, {"b": 1.0}, r"sample 0 has the names \['a'\] and sample 2 has the names \['b'\]"),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, r"sample 0 has the names \['a'\] and sample 2 has the names \['a', 'b'\]"),
        (1.0, {"a": 1.0}, r"sample 0 has the number 1 and sample 2 has the names \['a'\]"),
    ],
)
def test_f106_rewards_of_one_group_that_differ_are_refused_by_both_names(one, other, words):
    with pytest.raises(RewardError, match=f"^group g: .*{words}"):
        require_alike([(0, one), (2, other)], "group g")
    require_alike([(0, one), (2, one)], "group g")
    require_alike([], "group g")
