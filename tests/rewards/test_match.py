"""Rewards that compare the response with the label."""

from collections.abc import Callable

import pytest
import trio.testing

from trio_rollout._core.values import Trajectory
from trio_rollout.errors import RewardError
from trio_rollout.rewards import exact_match, regex_reward

Respond = Callable[..., Trajectory]


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42", 1.0),
        ("42", " 42 ", 1.0),
        ("42", 42, 1.0),
        ("42.", "42", 0.0),
        ("", "42", 0.0),
        ("Yes", "yes", 0.0),
    ],
)
async def test_exact_match_compares_text_without_the_space_around_it(respond: Respond, text, label, reward):
    with trio.testing.assert_checkpoints():
        assert await exact_match(respond(text, label=label)) == reward


async def test_exact_match_needs_a_label(respond: Respond):
    """Scoring 0.0 would train on a mistake in the data."""
    with pytest.raises(RewardError, match="prompt 0/7 has no label to compare the response with"):
        await exact_match(respond("42"))


@pytest.mark.parametrize(
    ("pattern", "text", "label", "reward"),
    [
        (r"#### (-?\d+)", "so\n#### 12", "12", 1.0),
        (r"#### (-?\d+)", "so\n#### 12", 12, 1.0),
        (r"#### (-?\d+)", "so\n#### 13", "12", 0.0),
        (r"#### (-?\d+)", "12", "12", 0.0),
        (r"#### (-?\d+)", "#### 12 no: #### 13", "12", 0.0),
        (r"#### (-?\d+)", "#### 13 no: #### 12", "12", 1.0),
        (r"\d+", "it is 12", "12", 1.0),
        (r"\d+", "it is 12", None, 1.0),
        (r"\d+", "none", None, 0.0),
        (r"(?:a|(b))", "a", "", 1.0),
        (r"(?s)<a>(.*?)</a>", "<a>\n x </a>", "x", 1.0),
    ],
)
async def test_the_first_group_of_the_last_match_is_compared(respond: Respond, pattern, text, label, reward):
    with trio.testing.assert_checkpoints():
        assert await regex_reward(pattern)(respond(text, label=label)) == reward


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ValueError, match=r"regex_reward: '\(' is no regular expression: missing \)"):
        regex_reward("(")
