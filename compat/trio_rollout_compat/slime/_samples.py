"""slime's ``Sample`` and the engine's values, converted into each other.

A sample is duck-typed: the object that the host made is copied, filled and handed back, whatever its class is.
"""

import copy
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import numpy as np

from trio_rollout import Group, Prompt, SamplingParams, Segment, Status, Stop, Trajectory, Turn, VersionSpan
from trio_rollout.errors import GenerateError, ServerLost

KEY: Final = "host"
"""The key in a prompt's metadata for its ``HostGroup``, and in a trajectory's for the finished samples."""

_SESSION: Final = ("session_id", "routing_key")
"""Names under which a host's sample may have the key of its conversation."""

_STATUS: Final = {"completed": Status.COMPLETED, "truncated": Status.TRUNCATED}


@final
@attrs.frozen(eq=False)
class HostGroup:
    """A group as the data source gave it; never changed. ``sampling`` and ``dataset`` are set for an evaluation."""

    samples: Sequence[Any]
    sampling: Mapping[str, Any] | None = None
    dataset: str = ""

    def __deepcopy__(self, memo: object) -> "HostGroup":
        return self  # the engine copies metadata for each rollout; only the one sample that is used needs it

    def fresh(self, index: int) -> Any:
        """Return a copy of one sample for one attempt, with a session id that was never used before."""
        sample = copy.deepcopy(self.samples[index])
        for name in _SESSION:
            if hasattr(sample, name):
                setattr(sample, name, str(uuid.uuid4()))
        return sample


def prompt_of(number: int, group: HostGroup) -> Prompt:
    """Return the engine's prompt for a group: the first sample's prompt. Tokens of an earlier try stay with each sample."""
    said = group.samples[0].prompt
    given: dict[str, Any] = {"text": said} if isinstance(said, str) else {"messages": said}
    if not isinstance(said, str) and said and not isinstance(said[0], Mapping):
        given = {"input_ids": said}
    return Prompt(id=str(number), metadata={KEY: group}, **given)


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    """Return the host's dict as the engine's sampling parameters; names without a field go into ``extra``."""
    named = {field.name for field in attrs.fields(SamplingParams)} - {"extra"}
    known = {name: value for name, value in params.items() if name in named and value is not None}
    extra = {name: value for name, value in params.items() if name not in named and value is not None}
    return SamplingParams(**known, extra=extra)


def fill(sample: Any, turn: Turn, *, mask_off_policy: bool) -> None:
    """Append a turn of the engine's client to a sample."""
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
        cache.add(dict(turn.meta_info))  # the host makes metrics of it


def flat(made: Any) -> list[Any]:
    """Return the samples of one rollout; a function that fans out makes several."""
    return list(made) if isinstance(made, list | tuple) else [made]


def is_finished(sample: Any) -> bool:
    """Return True if the host's buffer has this sample finished already."""
    return sample.status.value in _STATUS


def sampled_tokens(made: Any) -> int:
    """Return the number of tokens that the model sampled for what a generate function returned, by the loss masks."""
    counts = (sample.response_length if sample.loss_mask is None else sum(sample.loss_mask) for sample in flat(made))
    return int(sum(counts))


def trajectory_of(made: Any, prompt: Prompt, index: int) -> Trajectory:
    """Return the engine's trajectory for the samples that a generate function returned; it carries the samples themselves.

    Raises:
      ServerLost: a sample was aborted, but not by the engine: it is tried again, at no cost.
      GenerateError: a sample failed, or there are none.
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
    """Return one span with the oldest version: a sample does not say which version a token is of, and the oldest counts."""
    numbers = [int(version) for version in named if str(version).isdecimal()]
    return [VersionSpan(0, length, min(numbers))] if numbers and length else []


def made_of(group: Group) -> list[Any]:
    """Return a group in slime's shape: a list of samples, or of lists of samples."""
    return [row.metadata[KEY] for row in group.trajectories]


def index_of(made: Sequence[Any]) -> int:
    """Return the key that slime sorts groups by."""
    return int(flat(made[0])[0].index)
