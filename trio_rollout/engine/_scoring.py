"""Rewards, group rewards and the filter: user code, each call under the reward's deadline.

A scorer that raises, or returns what is no reward (``_core.scores``), is tried again alone, as ``Retry`` says: the sampled
tokens are good, so they are kept. The rollout fails with its error when the tries are used up, or when the scorer fails
twice in a row in the same way, as a programming error does. Infrastructure that fails under a scorer, such as a judge that
is down, costs no try: the scorer is asked again up to ``Retry.max_free`` times.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import attrs
import trio

from .._core.failure_log import ScorerTries
from .._core.failures import cause_of, failure_of
from .._core.scores import Score, require_alike, score_of, scores_of, shown
from .._core.values import Group, Trajectory
from .._util.time import retried, retry_wait_s
from .._util.user_code import ends_the_process
from ..abc import Drop, Keep
from ..errors import RewardError
from ._attempt import UNWANTED
from ._context import Scoring
from ._gate import deadline_after

T = TypeVar("T")
_LOGGER = logging.getLogger("trio_rollout")


async def reward_of(trajectory: Trajectory, context: Scoring) -> Score | None:
    """Return the trajectory's reward; without a reward function it is the one that the trajectory has.

    Blocks until the scorer has answered, and while it is tried again. Cancelled, the scorer is cancelled.

    Raises:
      RewardError: the scorer returned no reward, or did not answer in time.
      BaseException: what the scorer raised at its last try, of any class.
    """
    reward = context.reward
    if reward is None:
        return trajectory.reward

    def accept(score: object) -> Score:
        return score_of(score, "reward")

    return await _tried(
        lambda: reward(trajectory),
        accept,
        context,
        "reward",
        lambda: f"reward of group {trajectory.prompt.group_id}, rollout {trajectory.index}",
    )


async def group_scored(group: Group, context: Scoring) -> Group:
    """Return the group with the rewards that its group reward gives; without a group reward it is unchanged.

    Blocks and is cancelled as ``reward_of``.

    Raises:
      RewardError: the rewards of its samples differ in kind or names, or the group reward returned no rewards.
      BaseException: what the group reward raised at its last try, of any class.
    """
    group_reward, rows = context.group_reward, group.trajectories
    if not rows:
        return group
    if group_reward is None:
        require_alike([(row.index, row.reward) for row in rows if row.reward is not None], f"group {group.id}")
        return group

    def accept(values: object) -> list[Score]:
        what = f"group reward of {group.id}"
        scores = scores_of(values, len(rows), what, lambda index: f"group reward {index} of {group.id}")
        require_alike([(row.index, score) for row, score in zip(rows, scores, strict=True)], what)
        return scores

    scores = await _tried(
        lambda: group_reward(group), accept, context, "group reward", lambda: f"group reward of {group.id}"
    )
    scored = [attrs.evolve(row, reward=score) for row, score in zip(rows, scores, strict=True)]
    return attrs.evolve(group, trajectories=scored)


async def verdict_on(group: Group, context: Scoring) -> Keep | Drop:
    """Return the verdict of the user's filter; without a filter it is Keep(). Blocks, is cancelled and raises as ``reward_of``."""
    group_filter = context.group_filter
    if group_filter is None:
        return Keep()

    def accept(verdict: object) -> Keep | Drop:
        if not isinstance(verdict, Keep | Drop):
            raise RewardError(f"group filter of {group.id}: Keep() or Drop(reason) wanted, got {shown(verdict)}")
        return verdict

    return await _tried(
        lambda: group_filter(group), accept, context, "group filter", lambda: f"group filter of {group.id}"
    )


def _tried(
    once: Callable[[], Awaitable[object]],
    accept: Callable[[object], T],
    context: Scoring,
    work: str,
    what: Callable[[], str],
) -> Awaitable[T]:
    """Ask user code, and give what it answers within its time, once that is acceptable.

    ``work`` names the kind of function, ``what()`` the function and what it is for; that is put together for the log only.
    """
    retry, seconds = context.settings.retry, context.settings.deadlines.reward
    tries = ScorerTries(retry)

    def wait_after(error: BaseException) -> float | None:
        failure = failure_of(error, cause_of(error, retry.infrastructure))
        counts = failure.cause.uses_attempt
        backoff = tries.after(failure, counts=counts)
        if (text := context.failures.text_for(work, failure)) is not None:
            try_ = f"try {tries.used} of {retry.max_attempts}" if counts else "a try that does not count"
            _LOGGER.warning("%s: %s failed: %s", what(), try_, text)
        return None if backoff is None else retry_wait_s(backoff, retry=retry, rng=context.ports.random)

    return retried(lambda: _in_time(once, accept, seconds, work), wait_after)


async def _in_time(
    once: Callable[[], Awaitable[object]], accept: Callable[[object], T], seconds: float | None, work: str
) -> T:
    with trio.CancelScope(deadline=deadline_after(seconds)):
        try:
            answer = once()
            if not hasattr(answer, "__await__"):
                raise RewardError(
                    f"{work}: an async function wanted, got one that returned {shown(answer)}; in_thread(fn) makes one of it"
                )
            return accept(await answer)
        except trio.Cancelled as error:
            if ends_the_process(error):
                raise
            raise RewardError(f"{work}: {UNWANTED}") from error  # noqa: ASYNC104  no scope's Cancelled
    raise RewardError(f"{work}: no answer within its deadline of {seconds} s")
