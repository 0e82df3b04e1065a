"""The table of logits: exact, the same forwards and backwards, and writable by its owner."""

import json

import numpy as np
import pytest

from trio_rollout.tiny import TinyModel
from trio_rollout.tiny._model.model import Limits, draw

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def test_few_contexts_have_a_row_each():
    model = TinyModel.random(vocab=8, context_tokens=2, rows=4096)
    contexts = [[], *([a] for a in range(8)), *([a, b] for a in range(8) for b in range(8))]
    rows = {int(model.rows_of(model.codes(context))) for context in contexts}

    assert "a row for every context" in repr(model)
    assert model.rows == 81
    assert len(rows) == len(contexts)


def test_many_contexts_share_rows_evenly():
    model = TinyModel.random(vocab=512, context_tokens=3, rows=256)
    tokens = np.random.default_rng(0).integers(0, 512, 50_000)
    counts = np.bincount(model.row_indices(tokens), minlength=256)

    assert "hashed" in repr(model)
    assert 100 < counts.min() <= counts.max() < 300


def test_a_row_depends_on_the_last_tokens_only():
    model = TinyModel.random(vocab=16, context_tokens=3)
    rows = model.row_indices(TOKENS)

    assert rows[3] == model.rows_of(model.codes(TOKENS[:3]))
    assert rows.tolist()[5:] == model.row_indices(TOKENS, 5).tolist()
    assert model.row_indices([0, *TOKENS])[-4:].tolist() == rows[-4:].tolist()


def test_log_probs_are_the_log_softmax_of_the_row():
    model = TinyModel.random(vocab=16, context_tokens=3)
    logits = model.table[model.row_indices(TOKENS)].astype(np.float64) / 0.7
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    got = model.log_probs(TOKENS, 2, temperature=0.7)

    np.testing.assert_allclose(got, expected[np.arange(2, 11), TOKENS[2:]], atol=1e-5)


@pytest.mark.parametrize("name", ["weights.npz", "weights.npy", "folder"])
def test_saved_weights_come_back(tmp_path, name):
    model = TinyModel.random(vocab=8, context_tokens=2, rows=50)
    model.save(tmp_path / name)
    loaded = TinyModel.load(tmp_path / name, context_tokens=2)

    np.testing.assert_array_equal(model.table, loaded.table)
    assert loaded.context_tokens == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_a_saved_folder_says_the_size_of_its_vocabulary(tmp_path):
    TinyModel.random(vocab=8).save(tmp_path / "m")

    assert json.loads((tmp_path / "m" / "config.json").read_text())["vocab_size"] == 8


@pytest.mark.parametrize(
    ("array", "complaint"),
    [(np.zeros(3, np.float32), "shape"), (np.zeros((2, 2), np.int64), "int64"), (np.zeros((0, 4)), "shape")],
)
def test_what_is_no_table_is_refused(tmp_path, array, complaint):
    np.save(tmp_path / "w.npy", array)

    with pytest.raises(ValueError, match=complaint):
        TinyModel.load(tmp_path / "w.npy")


def test_weights_of_another_shape_are_refused_by_a_server(tmp_path):
    TinyModel.random(vocab=8, context_tokens=1).save(tmp_path / "w.npz")

    with pytest.raises(ValueError, match="expected 9 tokens and a context of 1, got 8 and 1"):
        TinyModel.load(tmp_path / "w.npz", like=TinyModel.random(vocab=9, context_tokens=1))


def test_a_policy_gradient_on_the_table_learns_the_task():
    """The answer is the prompt's last token plus one, modulo 8: REINFORCE with a mean baseline gets there."""
    model = TinyModel.random(vocab=8, context_tokens=1, scale=0.1)
    random = np.random.default_rng(0)

    def success() -> float:
        prompts = np.arange(8)
        scores = model.table[model.rows_of(prompts[:, None] + 1)]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return float((weights / weights.sum(axis=1, keepdims=True))[prompts, (prompts + 1) % 8].mean())

    before = success()
    for _ in range(60):
        prompts = random.integers(0, 8, 256)
        rows = model.rows_of(prompts[:, None] + 1)
        drawn = draw(model.table[rows], np.ones((256, 1), np.float32), random.random(256))
        rewards = (drawn.ids == (prompts + 1) % 8).astype(np.float32)
        shares = np.exp(drawn.shifted - drawn.log_total[:, None])
        shares[np.arange(256), drawn.ids] -= 1
        np.add.at(model.table, rows, -0.2 * (rewards - rewards.mean())[:, None] * shares)

    assert before < 0.2
    assert success() > 0.9


def test_limits_say_whether_they_limit():
    assert not Limits().any
    assert all(Limits(**one).any for one in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}))
