"""slime's data source and functions as the engine's source, generate function, rewards and filter.

A custom generate function may return aborted samples. That is the host's doing if it updates the weights at the moment, and the
function's own fault if it does so all the time; ``Aborts`` tells the two apart.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import trio

from trio_rollout import Drop, Group, Keep, Prompt, Trajectory
from trio_rollout.abc import Rollout
from trio_rollout.errors import GenerateError, ServerLost, SettingsError, SourceError
from trio_rollout.lowlevel import wait_s

from ..bridge import Bridge
from ._arguments import Arguments
from ._samples import (
    KEY,
    HostGroup,
    fill,
    flat,
    is_finished,
    made_of,
    prompt_of,
    sampled_tokens,
    sampling_of,
    trajectory_of,
)

_log: Final = logging.getLogger("trio_rollout.compat")
_NO_GROUP_PAUSE_S: Final = 0.1
_LONGEST_NO_GROUP_PAUSE_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
ROUNDS: Final = 20
"""Limit of rounds in which everything in flight comes back aborted, with nothing else in between: 7.5 minutes."""


@functools.cache  # a path means the same function for the life of the process; the host itself looks it up for each sample
def load(path: str) -> Any:
    """Return the function at a dotted path.

    Raises:
      SettingsError: there is no such function.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"{path!r} cannot be imported as a function: {error}") from error


@attrs.frozen(eq=False)
class Plugins:
    """The user's functions. Async methods run on the host's loop: call them through the bridge."""

    args: Arguments

    def generate_path(self, sample: Any) -> str | None:
        """Return the path of the generate function for this sample: its own, else the flag's; None for the stock one."""
        path: str | None = getattr(sample, "generate_function_path", None) or self.args.custom_generate_function_path
        return path

    async def generate(self, path: str, sample: Any, sampling: dict[str, Any], *, evaluation: bool) -> Any:
        """Call a custom generate function; with ``evaluation`` if it has such a parameter."""
        fn = load(path)
        more = {"evaluation": evaluation} if "evaluation" in inspect.signature(fn).parameters else {}
        return await fn(self.args.given, sample, sampling, **more)

    async def score(self, samples: Sequence[Any], *, batched: bool) -> None:
        """Set each sample's reward, unless it has one. ``batched``: one call for all, as for groups and fan-out."""
        wanted = [sample for sample in samples if sample.reward is None]
        if not wanted:
            return
        if batched:
            rewards = await self._scorer(wanted[0], batched=True)(self.args.given, wanted)
            for sample, reward in zip(wanted, rewards, strict=True):
                sample.reward = reward
        else:
            wanted[0].reward = await self._scorer(wanted[0], batched=False)(self.args.given, wanted[0])

    def _scorer(self, sample: Any, *, batched: bool) -> Any:
        path = getattr(sample, "custom_rm_path", None) or self.args.custom_rm_path
        return load(path) if path is not None else self.stock_scorer(batched=batched)

    def stock_scorer(self, *, batched: bool) -> Any:
        """Return the host's own reward function, for one sample or for several."""
        return load(f"{self.args.host}.rollout.rm_hub.{'batched_async_rm' if batched else 'async_rm'}")

    async def verdict(self, made: list[Any]) -> str | None:
        """Return the reason for which the dynamic filter drops a group, or None if it keeps the group."""
        said = load(self.args.dynamic_sampling_filter_path)(self.args.given, made)
        keep, reason = getattr(said, "keep", said), getattr(said, "reason", None)
        return None if keep else str(reason or "unnamed")


@final
@attrs.define(eq=False)
class HostSource:
    """slime's data source as the engine's. All calls come from the engine's thread, so there are no locks.

    Takes groups with ``get_samples``; unfinished ones go back with ``add_samples``, all at once, when the engine drains.

    It never ends: slime's sources wrap around. A source that has no group at the moment is asked again, as slime itself would,
    with a pause in between and a warning. Requeued groups wait in the engine.
    """

    _data_source: Any
    _samples: int
    _taken: int = attrs.field(default=0, init=False)

    async def take(self, count: int) -> Sequence[Prompt]:
        """Return up to ``count`` groups. Blocks the loop as long as the data source does, and waits while it has none."""
        await trio.lowlevel.checkpoint()
        tries, groups = 0, self._data_source.get_samples(count)
        while not groups:
            tries += 1
            if tries.bit_count() == 1:  # 1, 2, 4, 8, ...
                _log.warning("get_samples(%d) gave no group %d times in a row; asking again", count, tries)
            await wait_s(min(_LONGEST_NO_GROUP_PAUSE_S, _NO_GROUP_PAUSE_S * tries))
            groups = self._data_source.get_samples(count)
        wrong = {len(group) for group in groups} - {self._samples}
        if wrong:
            raise SourceError(
                f"get_samples({count}): groups of {self._samples} samples wanted, got one of {min(wrong)}"
            )
        prompts = [prompt_of(self._taken + number, HostGroup(group)) for number, group in enumerate(groups)]
        self._taken += len(prompts)
        return prompts

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Hand back unfinished groups, as they were taken."""
        await trio.lowlevel.checkpoint()
        returned = [list(group.samples) for prompt in prompts if isinstance(group := prompt.metadata[KEY], HostGroup)]
        if returned:
            self._data_source.add_samples(returned)

    def state(self) -> dict[str, object]:
        """Return nothing: the host saves its own data source."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Restore nothing."""
        del state


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
class HostFunctions:
    """slime's functions as the engine's. ``dropped``: groups that the filter dropped, by reason, since it was last emptied."""

    plugins: Plugins
    bridge: Bridge
    aborts: Aborts
    dropped: dict[str, int] = attrs.field(factory=dict, init=False)

    @property
    def args(self) -> Arguments:
        """The host's ``args``."""
        return self.plugins.args

    async def generate(self, prompt: Prompt, rollout: Rollout, /, *, evaluation: bool = False) -> Trajectory:
        """Make one sample: by the custom function on slime's loop, else by one turn through the engine's own client.

        One that the host's buffer has finished stays as it is, as the host's own function leaves it. Cancelled, a custom function ends as ``Bridge.call`` says.
        """
        group = prompt.metadata[KEY]
        if not isinstance(group, HostGroup):
            raise GenerateError(f"group {prompt.id} has lost its samples")
        sample = group.fresh(rollout.index)
        if is_finished(sample):
            await trio.lowlevel.checkpoint()
            return trajectory_of(sample, prompt, rollout.index)
        own = group.sampling
        sampling = self.args.sampling(rollout.index) if own is None else dict(own)
        path = self.plugins.generate_path(sample)
        if path is None:
            return trajectory_of(await self._stock(sample, sampling, rollout), prompt, rollout.index)
        before = sampled_tokens(sample)
        made = await self.bridge.call(self.plugins.generate, path, sample, sampling, evaluation=evaluation)
        rollout.note_tokens(max(0, sampled_tokens(made) - before))
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

    async def reward(self, trajectory: Trajectory, /) -> float:
        """Score one rollout: by a single call, or a batched one if the rollout fanned out.

        The sample keeps the function's result; the engine gets the number that the host trains on.
        """
        made = trajectory.metadata[KEY]
        await self.bridge.call(self.plugins.score, flat(made), batched=isinstance(made, list))
        number: float = self._number(made)
        return number

    async def group_reward(self, group: Group, /) -> Sequence[float]:
        """Score all samples of a group by one call: ``--group-rm``."""
        made = made_of(group)
        await self.bridge.call(self.plugins.score, [sample for one in made for sample in flat(one)], batched=True)
        return [self._number(one) for one in made]

    async def verdict(self, group: Group, /) -> Keep | Drop:
        """Return the verdict of ``--dynamic-sampling-filter-path``, and count it."""
        reason = await self.bridge.call(self.plugins.verdict, made_of(group))
        if reason is None:
            return Keep()
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        return Drop(reason)

    def _number(self, made: Any) -> Any:
        """Return the part of a rollout's reward that the engine checks: a number as it is, of a dict the value under the host's key.

        A dict without that key is the host's own business (a custom post-processing may read it): it counts as scored.
        """
        reward = flat(made)[-1].reward
        if not isinstance(reward, Mapping):
            return reward
        return next((reward[key] for key in (self.args.reward_key, self.args.eval_reward_key) if key in reward), 0.0)
