"""The agent example: the model's own tokens are trained, the tools' are not, and nothing is left running."""

import sys
from pathlib import Path

import pytest

from trio_rollout.tiny import TinyTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def agent_tools(monkeypatch):
    """The example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import agent_tools

    yield agent_tools
    sys.modules.pop("agent_tools", None)


def split(tokenizer, row):
    """The response's text that is trained, and the text that is not."""
    response = row.tokens[len(row.tokens) - row.response_length :]
    return tuple(tokenizer.decode(response[row.loss_mask == value].tolist()) for value in (1, 0))


async def test_model_output_is_trained_and_tool_output_is_not(agent_tools):
    groups = await agent_tools.run(prompt_count=4, samples=2)
    tokenizer = TinyTokenizer.load()
    trajectories = [row for group in groups for row in group.trajectories]

    assert [row.reward for row in trajectories] == [1.0] * 8
    assert [row.turns for row in trajectories] == [3, 3, 3, 3, 3, 3, 2, 2]
    for trajectory in trajectories:
        (row,) = trajectory.segments
        trained, masked = split(tokenizer, row)
        assert "tool_call" in trained
        assert "Exit code" not in trained
        assert "Exit code" in masked
        assert "tool_call" not in masked
        assert (row.log_probs[row.loss_mask == 0] == 0).all()
        assert (row.log_probs[row.loss_mask == 1] < 0).all()
        assert sum(span.stop - span.start for span in row.versions) == row.loss_mask.sum()
    slow = trajectories[-1]
    assert "command timed out" in split(tokenizer, slow.segments[0])[1]
    assert slow.status.value == "completed", "an observation, not a failure"
