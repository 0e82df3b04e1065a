"""The tree of token ids: each sampled token is trained once, as sampled, whatever an agent does to its conversation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout import Stop, Turn, VersionSpan
from trio_rollout._core.token_tree import Drift, TokenTree, continue_from


def turn(prompt, output, *, version=0):
    """Return a turn whose log-probs tell which token they belong to."""
    return Turn(
        rid=f"{len(prompt)}-{len(output)}",
        prompt_ids=prompt,
        output_ids=output,
        log_probs=[-float(token) / 1000 for token in output],
        text=" ".join(map(str, output)),
        stop=Stop.STOP,
        weight_version=version,
        versions=[VersionSpan(0, len(output), version)],
    )


def test_a_prompt_that_goes_on_extends_the_path():
    tree = TokenTree()
    first = tree.add(turn([1, 2], [3, 4]))
    second = tree.add(turn([1, 2, 3, 4, 5], [6], version=1))

    (row,) = tree.segments()

    assert second.parent is first
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask.tolist() == [1, 1, 0, 1]
    assert row.versions == (VersionSpan(0, 2, 0), VersionSpan(3, 4, 1))


def test_a_long_conversation_is_kept_once():
    """Every prompt holds the whole conversation before it: complete prompts would grow with the square of the turns."""
    tree, said = TokenTree(), [1]
    for number in range(50):
        tree.add(turn(said, [number, number + 1]))
        said = [*said, number, number + 1, 7, 7]

    (row,) = tree.segments()

    kept = sum(len(node.turn.prompt_ids) + len(node.turn.output_ids) for node in tree.nodes)
    assert kept == len(row.tokens) == len(said) - 2
    assert row.tokens.tolist() == tree.nodes[-1].tokens.tolist() == said[:-2]
    assert all(node.turn.prompt_ids.base is None for node in tree.nodes[1:])


def test_a_fork_trains_the_shared_answer_once():
    tree = TokenTree()
    tree.add(turn([1], [2, 3]))
    tree.add(turn([1, 2, 3, 4], [5]))
    tree.add(turn([1, 2, 3, 9], [7]))

    first, second = tree.segments()

    assert first.loss_mask.tolist() == [1, 1, 0, 1]
    assert second.tokens.tolist() == [1, 2, 3, 9, 7]
    assert second.loss_mask.tolist() == [0, 0, 0, 1]
    assert second.log_probs.tolist()[:3] == [0.0, 0.0, 0.0]
    assert second.versions == (VersionSpan(3, 4, 0),)


def test_a_roll_back_is_another_branch():
    """The agent dropped an answer and asked again with the context it had before."""
    tree = TokenTree()
    root = tree.add(turn([1], [2]))
    tree.add(turn([1, 2, 3], [4]))
    again = tree.add(turn([1, 2, 3], [5]))

    assert again.parent is root
    assert [row.tokens.tolist() for row in tree.segments()] == [[1, 2, 3, 4], [1, 2, 3, 5]]


def test_a_rewritten_context_is_a_row_of_its_own():
    tree = TokenTree()
    tree.add(turn([1, 2], [3]))
    summary = tree.add(turn([1, 9], [4]))

    assert summary.parent is None
    assert len(tree.segments()) == 2


def test_the_recorded_ids_win_over_what_the_text_would_become():
    tree = TokenTree()
    node = tree.add(turn([1], [2, 3]))

    same = continue_from(node, [4], retokenized=[2, 3, 4])
    other = continue_from(node, [4], retokenized=[23, 4])

    assert same.drift is Drift.NONE
    assert other.drift is Drift.REUSED
    assert same.prompt_ids.tolist() == other.prompt_ids.tolist() == [1, 2, 3, 4]


def test_an_undelivered_answer_can_be_dropped():
    tree = TokenTree()
    root = tree.add(turn([1], [2]))
    lost = tree.add(turn([1, 2, 3], [4]))

    with pytest.raises(ValueError, match="continued"):
        tree.remove(root)
    tree.remove(lost)

    assert [row.tokens.tolist() for row in tree.segments()] == [[1, 2]]
    with pytest.raises(ValueError, match="not in the tree"):
        tree.remove(lost)


def test_an_answer_without_tokens_is_refused():
    with pytest.raises(ValueError, match="without tokens"):
        TokenTree().add(turn([1], []))


@st.composite
def conversations(draw):
    """Make turns that extend, fork, roll back and rewrite, over few ids so that prefixes meet by chance."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    turns = []
    for version in range(draw(st.integers(1, 8))):
        base: list[int] = []
        if turns and draw(st.booleans()):
            earlier = draw(st.sampled_from(turns))
            base = [*earlier.prompt_ids.tolist(), *earlier.output_ids.tolist()]
            base = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        turns.append(turn([*base, *draw(ids)], draw(ids), version=version))
    return turns


@given(conversations())
def test_every_answer_is_trained_once_and_lines_up(turns):
    """Masks, log-probs and spans are at the positions of their tokens; the trained tokens are exactly the sampled ones."""
    tree = TokenTree()
    for item in turns:
        tree.add(item)

    rows = tree.segments()

    trained = []
    for row in rows:
        start = len(row.tokens) - row.response_length
        response = row.tokens[start:]
        covered = np.zeros(row.response_length, np.uint8)
        for begin, end, version in row.versions:
            assert not covered[begin:end].any()
            covered[begin:end] = 1
            trained.append((version, response[begin:end].tolist()))
        assert np.array_equal(covered, row.loss_mask)
        expected = np.where(row.loss_mask == 1, -response.astype(np.float32) / 1000, 0).astype(np.float32)
        assert np.allclose(row.log_probs, expected)
    assert sorted(trained) == sorted((number, item.output_ids.tolist()) for number, item in enumerate(turns))
    paths = [row.tokens.tolist() for row in rows]
    for item in turns:
        whole = [*item.prompt_ids.tolist(), *item.output_ids.tolist()]
        assert any(path[: len(whole)] == whole for path in paths)
