"""slime's ``Sample`` and our values. A sample is duck-typed: whatever class the host made is copied, filled and handed back."""

import copy
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import numpy as np

from trio_rollout import Group, Prompt, SamplingParams, Segment, Status, Stop, Trajectory, Turn, VersionSpan
from trio_rollout.errors import GenerateError, ServerLost

KEY: Final = "host"
"""Where a prompt's metadata has its ``Pristine`` samples, and a trajectory's what became of one."""

_SESSION: Final = ("session_id", "routing_key")
"""Under which name a host's sample has the key of its conversation."""

_STATUS: Final = {"completed": Status.COMPLETED, "truncated": Status.TRUNCATED}


@final
@attrs.frozen(eq=False)
class Pristine:
    """A group as the data source gave it; never changed. ``sampling``, ``generate_path``: an evaluation's own."""

    samples: Sequence[Any]
    sampling: Mapping[str, Any] | None = None
    dataset: str = ""

    def __deepcopy__(self, memo: object) -> "Pristine":
        return self  # the engine copies metadata for each rollout; only the one sample that is used needs it

    def fresh(self, index: int) -> Any:
        """A copy of one sample for one attempt, under a session id that nothing has used before."""
        sample = copy.deepcopy(self.samples[index])
        for name in _SESSION:
            if hasattr(sample, name):
                setattr(sample, name, str(uuid.uuid4()))
        return sample


def prompt_of(number: int, pristine: Pristine) -> Prompt:
    """The engine's prompt for a group. What it says is the first sample's; tokens of an earlier try go with each sample."""
    said = pristine.samples[0].prompt
    given: dict[str, Any] = {"text": said} if isinstance(said, str) else {"messages": said}
    if not isinstance(said, str) and said and not isinstance(said[0], Mapping):
        given = {"input_ids": said}
    return Prompt(id=str(number), metadata={KEY: pristine}, **given)


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    """The host's dict as the engine's sampling parameters; what has no field rides along."""
    named = {field.name for field in attrs.fields(SamplingParams)} - {"extra"}
    known = {name: value for name, value in params.items() if name in named and value is not None}
    extra = {name: value for name, value in params.items() if name not in named and value is not None}
    return SamplingParams(**known, extra=extra)


def fill(sample: Any, turn: Turn, *, mask_off_policy: bool) -> None:
    """Append one answer of the engine's client to a sample."""
    mask = np.ones(len(turn.output_ids), np.int64)
    if mask_off_policy:
        for start, stop, version in turn.versions:
            mask[start:stop] = version == turn.weight_version
    before = list(sample.loss_mask or [0 if mask_off_policy else 1] * sample.response_length)
    if not sample.tokens:
        sample.tokens = turn.prompt_ids.tolist()
    sample.rollout_log_probs = [*(sample.rollout_log_probs or [0.0] * sample.response_length), *turn.log_probs.tolist()]
    sample.tokens = [*sample.tokens, *turn.output_ids.tolist()]
    sample.response += turn.text
    sample.response_length += len(turn.output_ids)
    if sample.loss_mask is not None or not mask.all() or not all(before):
        sample.loss_mask = [*before, *mask.tolist()]
    sample.weight_versions = [*sample.weight_versions, *(str(span.version) for span in turn.versions)]
    sample.status = type(sample.status)("truncated" if turn.stop is Stop.LENGTH else "completed")
    if (cache := getattr(sample, "prefix_cache_info", None)) is not None:
        cache.add(dict(turn.meta_info))  # what the host's own metrics are made of


def flat(made: Any) -> list[Any]:
    """The samples of one rollout: fan-out gives several."""
    return list(made) if isinstance(made, list | tuple) else [made]


def trajectory_of(made: Any, prompt: Prompt, index: int) -> Trajectory:
    """What a generate function returned, as the engine's; the samples themselves ride along.

    Raises:
      ServerLost: one of them was aborted, which nobody here has done: the group is tried again, at no cost.
      GenerateError: one failed, or there are none.

    """
    samples = flat(made)
    states = [sample.status.value for sample in samples]
    if "aborted" in states:
        raise ServerLost(
            f"sample {index} of group {prompt.id} came back aborted: its server was paused or aborted by the host"
        )
    if not samples or not set(states) <= set(_STATUS):
        raise GenerateError(f"sample {index} of group {prompt.id}: completed or truncated samples wanted, got {states}")
    return Trajectory(
        prompt=prompt,
        index=index,
        segments=[_segment(sample) for sample in samples],
        status=_STATUS[states[-1]],
        stop=Stop.LENGTH if states[-1] == "truncated" else Stop.STOP,
        turns=len(samples),
        metadata={KEY: made},
    )


def _segment(sample: Any) -> Segment:
    length = sample.response_length
    log_probs = sample.rollout_log_probs
    return Segment(
        tokens=sample.tokens,
        response_length=length,
        loss_mask=sample.loss_mask if sample.loss_mask is not None else [1] * length,
        log_probs=log_probs if log_probs is not None else [0.0] * length,
        versions=_versions(sample.weight_versions, length),
        text=sample.response,
    )


def _versions(named: Sequence[Any], length: int) -> list[VersionSpan]:
    """The whole response under the oldest version: a sample does not say which token is of which, and the oldest counts."""
    numbers = [int(version) for version in named if str(version).isdecimal()]
    return [VersionSpan(0, length, min(numbers))] if numbers and length else []


def made_of(group: Group) -> list[Any]:
    """A group in slime's shape: a list of samples, or of lists of them."""
    return [row.metadata[KEY] for row in group.trajectories]


def index_of(made: Sequence[Any]) -> int:
    """What slime sorts groups by."""
    return int(flat(made[0])[0].index)
