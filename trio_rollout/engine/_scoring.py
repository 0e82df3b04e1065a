"""Rewards, group rewards and the filter: user code, each call under the reward's deadline.

A scorer that raises, or returns None, NaN or another type, is tried again alone, as ``Retry`` says: the sampled tokens are
good, so they are kept. When the tries are used up, the attempt ends with the scorer's error.
"""

import logging
import math
import numbers
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import attrs
import trio

from .._core.failures import failure_of
from .._core.values import Group, Trajectory
from .._util.time import retry_wait_s, wait_s
from ..abc import Drop, Keep
from ..errors import RewardError
from ._attempt import UNWANTED, is_unwanted
from ._context import RolloutContext
from ._gate import deadline_after

T = TypeVar("T")
_LOGGER = logging.getLogger("trio_rollout")
Score: TypeAlias = float | Mapping[str, float]


async def reward_of(trajectory: Trajectory, context: RolloutContext) -> Score | None:
    """Return the trajectory's reward; if there is no reward function, the one that it has.

    Raises:
      RewardError: the scorer returned no reward every time.
      Exception: the scorer raised this at its last try.
    """
    reward = context.reward
    if reward is None:
        return trajectory.reward

    def accept(score: object) -> Score:
        return _checked(score, f"reward of rollout {trajectory.index}")

    return await _tried(
        lambda: reward(trajectory),
        accept,
        context,
        lambda: f"reward of group {trajectory.prompt.group_id}, rollout {trajectory.index}",
    )


async def group_scored(group: Group, context: RolloutContext) -> Group:
    """Return the group with the rewards of the group reward; unchanged if there is no group reward."""
    group_reward = context.group_reward
    if group_reward is None:
        return group

    def accept(scores: object) -> list[Score]:
        if not isinstance(scores, Sequence) or len(scores) != len(group.trajectories):
            raise RewardError(
                f"group reward of {group.id}: {len(group.trajectories)} rewards wanted, got {_shown(scores)}"
            )
        return [_checked(score, f"group reward {index} of {group.id}") for index, score in enumerate(scores)]

    scores = await _tried(lambda: group_reward(group), accept, context, lambda: f"group reward of {group.id}")
    rows = [attrs.evolve(row, reward=score) for row, score in zip(group.trajectories, scores, strict=True)]
    return attrs.evolve(group, trajectories=rows)


async def verdict_on(group: Group, context: RolloutContext) -> Keep | Drop:
    """Return the verdict of the user's filter; Keep() if there is no filter."""
    group_filter = context.group_filter
    if group_filter is None:
        return Keep()

    def accept(verdict: object) -> Keep | Drop:
        if not isinstance(verdict, Keep | Drop):
            raise RewardError(f"group filter of {group.id}: Keep() or Drop(reason) wanted, got {_shown(verdict)}")
        return verdict

    return await _tried(lambda: group_filter(group), accept, context, lambda: f"group filter of {group.id}")


async def _tried(
    once: Callable[[], Awaitable[object]],
    accept: Callable[[object], T],
    context: RolloutContext,
    what: Callable[[], str],
) -> T:
    """Return the first acceptable answer of user code. ``what`` names the call; it is called for errors only."""
    retry, seconds = context.settings.retry, context.settings.deadlines.reward
    number = 0
    while True:
        number += 1
        try:
            return accept(await _in_time(once, seconds, what))
        except Exception as error:
            if number >= retry.max_attempts:
                raise
            why = failure_of(error)
            _LOGGER.warning("%s: try %d of %d failed: %s", what(), number, retry.max_attempts, why)
        await wait_s(retry_wait_s(number, retry=retry, rng=context.ports.random))


async def _in_time(once: Callable[[], Awaitable[object]], seconds: float | None, what: Callable[[], str]) -> object:
    with trio.CancelScope(deadline=deadline_after(seconds)):
        try:
            answer = once()
            if not hasattr(answer, "__await__"):
                raise RewardError(
                    f"{what()}: an async function wanted, got one that returned {_shown(answer)}; in_thread(fn) makes one of it"
                )
            return await answer
        except trio.Cancelled as error:
            if is_unwanted():
                raise RewardError(f"{what()}: {UNWANTED}") from error  # noqa: ASYNC104  no scope's Cancelled
            raise
    raise RewardError(f"{what()}: no answer within its deadline of {seconds} s")


def _checked(score: object, what: str) -> Score:
    # What most scorers return, first: each look at an abstract class costs a microsecond.
    if type(score) is float and math.isfinite(score):
        return score
    if isinstance(score, Mapping):
        return {str(name): _number(value, f"{what}, {name!r}") for name, value in score.items()}
    return _number(score, what)


def _number(value: object, what: str) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"{what}: a finite number wanted, got {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {textwrap.shorten(text, 80)}"
