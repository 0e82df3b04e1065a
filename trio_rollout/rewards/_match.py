"""Stock rewards that compare a response with its prompt's label."""

import re
from typing import final

import attrs
import trio

from .._core.values import Trajectory
from .._util.arguments import require
from ..errors import RewardError


async def exact_match(trajectory: Trajectory, /) -> float:
    """Return 1.0 if the response and the label are the same text, without surrounding whitespace; else 0.0.

    A label that is no string counts as ``str(label)``. Does not block.

    Raises:
      RewardError: the prompt has no label.
    """
    await trio.lowlevel.checkpoint()
    return float(trajectory.text.strip() == _label(trajectory))


@final
@attrs.frozen
class RegexMatch:
    """A reward made by ``regex_reward``."""

    pattern: re.Pattern[str]

    async def __call__(self, trajectory: Trajectory, /) -> float:
        """Return 1.0 if the last match equals the label, or there is a match and no label; else 0.0.

        Does not block, but searches on the loop: a pattern that backtracks for long stops everything.
        """
        await trio.lowlevel.checkpoint()
        matches = list(self.pattern.finditer(trajectory.text))
        if not matches:
            return 0.0
        if trajectory.prompt.label is None:
            return 1.0
        answer: str | None = matches[-1][1 if self.pattern.groups else 0]
        return float((answer or "").strip() == _label(trajectory))


def regex_reward(pattern: str | re.Pattern[str]) -> RegexMatch:
    r"""Return a reward that finds an answer in the response by a pattern, such as ``r"#### (-?\d+)"``.

    The last match counts, because a model may repeat the form while it thinks. Its first group, or the whole match if the
    pattern has no groups, is compared with the label, without surrounding whitespace; a group that took no part in the match
    is the empty text. Without a label any match is 1.0.

    Raises:
      ValueError: the pattern is no regular expression.
    """
    require("pattern", pattern, (str, re.Pattern), "a regular expression as text, or compiled")
    try:
        return RegexMatch(re.compile(pattern))
    except re.error as error:
        raise ValueError(f"regex_reward: {pattern!r} is no regular expression: {error}") from error


def _label(trajectory: Trajectory) -> str:
    label = trajectory.prompt.label
    if label is None:
        raise RewardError(f"prompt {trajectory.prompt.group_id} has no label to compare the response with")
    return str(label).strip()
