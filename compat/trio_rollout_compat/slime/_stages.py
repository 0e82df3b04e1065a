"""slime's functions as the engine's generate, reward, group reward and filter."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs

from trio_rollout._core.values import Group, Prompt, Trajectory
from trio_rollout.abc import Drop, Keep, Rollout
from trio_rollout.errors import GenerateError, ServerLost

from ..bridge import Bridge
from ._aborts import Aborts
from ._arguments import Arguments
from ._plugins import Plugins
from ._samples import KEY, Pristine, fill, flat, made_of, sampling_of, trajectory_of


@final
@attrs.frozen(eq=False)
class Generate:
    """One sample: the custom function on slime's loop, else one turn through the engine's own client."""

    args: Arguments
    plugins: Plugins
    bridge: Bridge
    aborts: Aborts
    evaluation: bool = False

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Run it."""
        pristine = prompt.metadata[KEY]
        if not isinstance(pristine, Pristine):
            raise GenerateError(f"group {prompt.id} has lost its samples")
        sample = pristine.fresh(rollout.index)
        own = pristine.sampling
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

    async def _stock(  # noqa: ASYNC910  a sample that is full already asks for nothing
        self, sample: Any, sampling: dict[str, Any], rollout: Rollout
    ) -> Any:
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
            return sample  # noqa: ASYNC910
        turn = await rollout.generate(sample.tokens if begun else rollout.input, sampling_of(asked))
        masked = self.args.partial_rollout and self.args.mask_offpolicy_in_partial_rollout
        fill(sample, turn, mask_off_policy=bool(masked))
        return sample


@final
@attrs.frozen(eq=False)
class Reward:
    """The reward of one rollout: single, or batched where the rollout fanned out."""

    plugins: Plugins
    bridge: Bridge

    async def __call__(self, trajectory: Trajectory, /) -> float | Mapping[str, float]:
        """Score it. The sample keeps what the function returned; the engine sees the numbers in it."""
        made = trajectory.metadata[KEY]
        await self.bridge.call(self.plugins.score, flat(made), batched=isinstance(made, list))
        numbers_in: float | Mapping[str, float] = _numbers(flat(made)[-1].reward)
        return numbers_in


@final
@attrs.frozen(eq=False)
class GroupReward:
    """``--group-rm``: one call for all samples of a group."""

    plugins: Plugins
    bridge: Bridge

    async def __call__(self, group: Group, /) -> Sequence[float | Mapping[str, float]]:
        """Score them."""
        made = made_of(group)
        await self.bridge.call(self.plugins.score, [sample for one in made for sample in flat(one)], batched=True)
        return [_numbers(flat(one)[-1].reward) for one in made]


@final
@attrs.frozen(eq=False)
class Filter:
    """``--dynamic-sampling-filter-path``. ``dropped`` counts by reason, since it was last emptied."""

    plugins: Plugins
    bridge: Bridge
    dropped: dict[str, int]

    async def __call__(self, group: Group, /) -> Keep | Drop:
        """Ask it."""
        reason = await self.bridge.call(self.plugins.verdict, made_of(group))
        if reason is None:
            return Keep()
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        return Drop(reason)


def _numbers(reward: object) -> Any:
    """What the engine checks: a number as it is, of a dict the numbers; the rest is the host's business."""
    if isinstance(reward, Mapping):
        return {name: value for name, value in reward.items() if isinstance(value, numbers.Real)}
    return reward
