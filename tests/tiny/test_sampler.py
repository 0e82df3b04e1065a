"""Sampling: the right distribution, the right sets, and no token that is not allowed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout.tiny._model.model import EVERY_TOKEN, Limits, draw, log_softmax, mixed, uniforms


def seeds(count: int) -> np.ndarray:
    return mixed(np.arange(count, dtype=np.uint64))


def sample(logits: np.ndarray, count: int, limits: Limits | None = None, temperature: float = 1.0):
    rows = np.repeat(logits[None].astype(np.float32), count, axis=0)
    limited = [(row, limits) for row in range(count)] if limits else []
    numbers = uniforms(seeds(count), np.zeros(count, np.uint64))
    return draw(rows, np.full((count, 1), temperature, np.float32), numbers, limited)


@pytest.mark.parametrize("vocab", [7, 32, 33, 100])
def test_tokens_come_as_often_as_they_should(vocab):
    logits = np.random.default_rng(1).standard_normal(vocab) * 1.5
    counts = np.bincount(sample(logits, 40_000).ids, minlength=vocab)
    expected = 40_000 * np.exp(log_softmax(logits[None].astype(np.float32))[0])
    surprise = ((counts - expected) ** 2 / expected).sum() / (vocab - 1)  # chi-squared, 1 on average

    assert 0.1 < surprise < 2.0


def test_log_probs_are_after_the_temperature_and_before_the_limits():
    logits = np.random.default_rng(2).standard_normal(50)
    drawn = sample(logits, 100, Limits(top_k=3, top_p=0.5), temperature=0.5)
    expected = log_softmax((logits[None] / 0.5).astype(np.float32))[0]

    np.testing.assert_allclose(drawn.log_probs, expected[drawn.ids], atol=1e-5)
    np.testing.assert_allclose(drawn.row(7), expected, atol=1e-5)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=70),
    st.integers(1, 80),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_only_allowed_tokens_come(values, top_k, top_p, min_p):
    logits = np.array(values)
    drawn = sample(logits, 30, Limits(top_k=top_k, top_p=top_p, min_p=min_p))
    shares = np.exp(log_softmax(logits[None].astype(np.float32))[0].astype(np.float64))
    order = np.argsort(-shares, kind="stable")
    before = dict(zip(order.tolist(), (np.cumsum(shares[order]) - shares[order]).tolist(), strict=True))
    rank = {token: place for place, token in enumerate(order.tolist())}

    for token in drawn.ids.tolist():
        assert rank[token] < top_k or shares[token] == pytest.approx(shares[order[top_k - 1]])
        assert before[token] <= top_p + 1e-5
        assert shares[token] >= shares.max() * min_p - 1e-5


def test_a_limit_of_one_is_greedy():
    logits = np.array([0.0, 3.0, 2.0, 3.0])

    assert set(sample(logits, 50, Limits(top_k=1)).ids.tolist()) == {1}


def test_a_token_without_any_chance_never_comes():
    logits = np.full(100, -np.inf)
    logits[[40, 70]] = 0.0

    assert set(sample(logits, 2000).ids.tolist()) == {40, 70}


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-24])
def test_the_ends_of_the_dice_are_safe(number):
    logits = np.full((1, 64), -np.inf, np.float32)
    logits[0, 33] = 0.0

    assert draw(logits, np.ones((1, 1), np.float32), np.array([number])).ids.tolist() == [33]


def test_the_dice_depend_on_seed_and_position_only():
    one = uniforms(seeds(3), np.array([4, 5, 6], np.uint64))
    alone = uniforms(seeds(3)[1:2], np.array([5], np.uint64))

    assert alone[0] == one[1]
    assert len({*one.tolist()}) == 3
    assert ((one >= 0) & (one < 1)).all()


def test_every_token_is_sglangs_number():
    assert EVERY_TOKEN == 2**30
