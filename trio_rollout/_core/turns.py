"""Parts of one turn: an answer that was interrupted and went on from the tokens it had becomes one turn again."""

from collections.abc import Sequence

import attrs
import numpy as np

from .segments import _joined
from .enums import Stop
from .sampling import SamplingParams
from .values import Turn, VersionSpan


def remaining(sampling: SamplingParams, parts: Sequence[Turn]) -> SamplingParams:
    """The sampling of the next part: ``max_new_tokens`` less what the parts have."""
    return attrs.evolve(sampling, max_new_tokens=sampling.max_new_tokens - _tokens(parts))


def is_used_up(sampling: SamplingParams, parts: Sequence[Turn]) -> bool:
    """Whether the parts have all the tokens that were asked for."""
    return _tokens(parts) >= sampling.max_new_tokens


def context_after(parts: Sequence[Turn]) -> np.ndarray:
    """The prompt of the next part: the first part's prompt and everything sampled since."""
    return np.concatenate([parts[0].prompt_ids, *(part.output_ids for part in parts)])


def merge(parts: Sequence[Turn], *, stop: Stop | None = None) -> Turn:
    """One turn of several parts: ids, log-probs and version spans in order; the rest is the last part's.

    ``queue_s`` and ``latency_s`` are sums over the parts that know them.
    """
    if len(parts) == 1 and stop is None:
        return parts[0]
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        spans.extend(VersionSpan(start + offset, end + offset, version) for start, end, version in part.versions)
        offset += len(part.output_ids)
    return attrs.evolve(
        parts[-1],
        prompt_ids=parts[0].prompt_ids,
        output_ids=np.concatenate([part.output_ids for part in parts]),
        log_probs=np.concatenate([part.log_probs for part in parts]),
        text="".join(part.text for part in parts),
        stop=stop or parts[-1].stop,
        versions=_joined(spans),
        cached_tokens=parts[0].cached_tokens,
        queue_s=_total([part.queue_s for part in parts]),
        latency_s=_total([part.latency_s for part in parts]),
    )


def no_room(prompt: Sequence[int] | np.ndarray | str, weight_version: int) -> Turn:
    """The turn that was not sampled because its prompt fills the context."""
    return Turn(
        rid="",
        prompt_ids=() if isinstance(prompt, str) else prompt,
        output_ids=(),
        log_probs=(),
        text="",
        stop=Stop.LENGTH,
        weight_version=weight_version,
        versions=(),
    )


def _tokens(parts: Sequence[Turn]) -> int:
    return sum(len(part.output_ids) for part in parts)


def _total(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if known else None
