"""slime's functions as the engine's generate function, reward, group reward and filter.

A custom generate function may return aborted samples. That is the host's doing if it updates the weights at the moment, and the
function's own fault if it does so all the time; ``Aborts`` tells the two apart.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs

from trio_rollout import Drop, Group, Keep, Prompt, Trajectory
from trio_rollout.abc import Rollout
from trio_rollout.errors import GenerateError, ServerLost
from trio_rollout.lowlevel import wait_s

from ..bridge import Bridge
from ._arguments import Arguments
from ._plugins import Plugins
from ._samples import KEY, HostGroup, fill, flat, made_of, sampling_of, trajectory_of

_log: Final = logging.getLogger("trio_rollout.compat")
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
ROUNDS: Final = 20
"""Limit of rounds in which everything in flight comes back aborted, with nothing else in between: 7.5 minutes."""


@final
@attrs.define(eq=False)
class Aborts:
    """Counts aborted results in a row, for all custom functions of an engine that has ``at_once`` rollouts in flight.

    A weight update of the host aborts at most that many at once. If more come, with no result of another kind, each of them
    keeps its slot for a while, longer with each round, so that the source is not drained meanwhile.
    """

    at_once: int
    in_a_row: int = 0

    def forget(self) -> None:
        """Start again: a result of another kind came."""
        self.in_a_row = 0

    async def note(self, lost: ServerLost) -> None:
        """Count an aborted result, and wait until it may be tried again. Cancelled, it stays counted.

        Raises:
          GenerateError: everything has been aborted for so long that weight updates cannot be the reason.
        """
        rounds = self.in_a_row // self.at_once
        self.in_a_row += 1
        if rounds >= ROUNDS:
            raise GenerateError(
                f"{self.in_a_row} answers in a row came back aborted, with {self.at_once} in flight, and nothing else in between: "
                "a weight update is not the reason; the generate function or its servers abort everything"
            ) from lost
        if not rounds:
            return
        if self.in_a_row % self.at_once == 1 or self.at_once == 1:
            _log.warning("%d answers in a row came back aborted, and nothing else in between: %s", self.in_a_row, lost)
        await wait_s(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (rounds - 1)))


@final
@attrs.frozen(eq=False)
class Generate:
    """Makes one sample: by the custom function on slime's loop, else by one turn through the engine's own client."""

    args: Arguments
    plugins: Plugins
    bridge: Bridge
    aborts: Aborts
    evaluation: bool = False

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Make one sample of the group. Cancelled, a custom function ends as ``Bridge.call`` says."""
        group = prompt.metadata[KEY]
        if not isinstance(group, HostGroup):
            raise GenerateError(f"group {prompt.id} has lost its samples")
        sample = group.fresh(rollout.index)
        own = group.sampling
        sampling = self.args.sampling(rollout.index) if own is None else dict(own)
        path = self.plugins.generate_path(sample)
        if path is None:
            return trajectory_of(await self._stock(sample, sampling, rollout), prompt, rollout.index)
        made = await self.bridge.call(self.plugins.generate, path, sample, sampling, evaluation=self.evaluation)
        try:
            trajectory = trajectory_of(made, prompt, rollout.index)
        except ServerLost as lost:
            await self.aborts.note(lost)  # noqa: ASYNC120  a cancellation may win
            raise
        self.aborts.forget()
        return trajectory

    async def _stock(self, sample: Any, sampling: dict[str, Any], rollout: Rollout) -> Any:
        if any(value is not None for value in (getattr(sample, "multimodal_inputs", None) or {}).values()):
            raise GenerateError("images need a custom generate function: the stock one sends token ids")
        begun = sample.response_length > 0 and self.args.partial_rollout
        if not begun:
            sample.tokens, sample.response, sample.response_length = [], "", 0
            sample.loss_mask = sample.rollout_log_probs = None
            sample.weight_versions = []
        asked = {**sampling, "max_new_tokens": sampling["max_new_tokens"] - sample.response_length}
        if asked["max_new_tokens"] <= 0:
            sample.status = type(sample.status)("truncated")
            return sample
        turn = await rollout.generate(sample.tokens if begun else rollout.input, sampling_of(asked))
        masked = self.args.partial_rollout and self.args.mask_offpolicy_in_partial_rollout
        fill(sample, turn, mask_off_policy=bool(masked))
        return sample


@final
@attrs.frozen(eq=False)
class Reward:
    """Scores one rollout: by a single call, or a batched one if the rollout fanned out."""

    plugins: Plugins
    bridge: Bridge

    async def __call__(self, trajectory: Trajectory, /) -> float:
        """Score the rollout. The sample keeps the function's result; the engine gets the number that the host trains on."""
        made = trajectory.metadata[KEY]
        await self.bridge.call(self.plugins.score, flat(made), batched=isinstance(made, list))
        number: float = _number(flat(made)[-1].reward, self.plugins.args)
        return number


@final
@attrs.frozen(eq=False)
class GroupReward:
    """Scores all samples of a group by one call: ``--group-rm``."""

    plugins: Plugins
    bridge: Bridge

    async def __call__(self, group: Group, /) -> Sequence[float]:
        """Score the group."""
        made = made_of(group)
        await self.bridge.call(self.plugins.score, [sample for one in made for sample in flat(one)], batched=True)
        return [_number(flat(one)[-1].reward, self.plugins.args) for one in made]


@final
@attrs.frozen(eq=False)
class Filter:
    """Filters groups: ``--dynamic-sampling-filter-path``. ``dropped`` counts by reason, since it was last emptied."""

    plugins: Plugins
    bridge: Bridge
    dropped: dict[str, int]

    async def __call__(self, group: Group, /) -> Keep | Drop:
        """Return the filter's verdict, and count it."""
        reason = await self.bridge.call(self.plugins.verdict, made_of(group))
        if reason is None:
            return Keep()
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        return Drop(reason)


def _number(reward: object, args: Arguments) -> Any:
    """Return the part of a reward that the engine checks: a number as it is, of a dict the value under the host's key.

    A dict without that key is the host's own business (a custom post-processing may read it): it counts as scored.
    """
    if not isinstance(reward, Mapping):
        return reward
    return next((reward[key] for key in (args.reward_key, args.eval_reward_key) if key in reward), 0.0)
