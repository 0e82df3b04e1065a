"""Training rows from turns: turns whose prompt continues the row become one row.

The tokens between two answers (tool output, the next user message) are part of the response with mask 0. A turn whose
prompt does not continue the row, because the context was rewritten, begins another row, so each sampled token is trained
once. An answer that was interrupted and went on from the tokens that it had becomes one turn again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from .enums import Status, Stop
from .sampling import SamplingParams, with_most_tokens
from .values import Segment, Turn, VersionSpan, trusted


@attrs.define(eq=False)
class Row:
    """One training row as it grows: context and answers, alternately."""

    prompt: np.ndarray
    tokens: list[np.ndarray]
    masks: list[np.ndarray]
    log_probs: list[np.ndarray]
    versions: list[VersionSpan]
    length: int = 0
    text: str = ""
    extras: Mapping[str, npt.NDArray[Any]] = attrs.field(factory=dict)
    """The extras of the last turn: its prompt is everything before."""

    @classmethod
    def begin(cls, turn: Turn, *, trained: bool = True) -> "Row":
        """Return a row that begins with this turn."""
        row = cls(prompt=turn.prompt_ids, tokens=[], masks=[], log_probs=[], versions=[])
        row.answer(turn, trained=trained)
        return row

    def extend(self, turn: Turn, *, trained: bool = True) -> None:
        """Append a turn whose prompt continues this row."""
        self.context(turn.prompt_ids[len(self.prompt) + self.length :])
        self.answer(turn, trained=trained)

    def answer(self, turn: Turn, *, trained: bool = True) -> None:
        """Append the tokens that a turn sampled; as context if not ``trained``, because another row trains them."""
        self.text = turn.text
        self.extras = turn.extras
        if not trained:
            self.context(turn.output_ids)
            return
        size = len(turn.output_ids)
        for start, stop, version in turn.versions:
            _add_span(self.versions, self.length + start, self.length + stop, version)
        self._append(turn.output_ids, np.ones(size, np.uint8), turn.log_probs)

    def context(self, ids: np.ndarray) -> None:
        """Append tokens that were not sampled, or are not to be trained."""
        self._append(ids, np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32))

    def continues_with(self, prompt_ids: np.ndarray) -> bool:
        """Return True if these ids begin with all ids of this row."""
        so_far = len(self.prompt) + self.length
        return len(prompt_ids) >= so_far and np.array_equal(
            prompt_ids[:so_far], np.concatenate([self.prompt, *self.tokens])
        )

    def segment(self) -> Segment:
        """The row as a value."""
        return Segment(
            tokens=np.concatenate([self.prompt, *self.tokens]),
            response_length=self.length,
            loss_mask=np.concatenate(self.masks),
            log_probs=np.concatenate(self.log_probs),
            versions=tuple(self.versions),
            text=self.text,
            extras=self.extras,
        )

    def _append(self, ids: np.ndarray, mask: np.ndarray, log_probs: np.ndarray) -> None:
        self.tokens.append(ids)
        self.masks.append(mask)
        self.log_probs.append(log_probs)
        self.length += len(ids)


def segments_of(turns: Sequence[Turn]) -> tuple[Segment, ...]:
    """The training rows of a rollout's turns, in order."""
    if len(turns) == 1:
        return (_only_row(turns[0]),)
    rows: list[Row] = []
    for turn in turns:
        if rows and rows[-1].continues_with(turn.prompt_ids):
            rows[-1].extend(turn)
        else:
            rows.append(Row.begin(turn))
    return tuple(row.segment() for row in rows)


def _only_row(turn: Turn) -> Segment:
    """Return the segment of a single turn without building a ``Row``: most rollouts have one turn."""
    size = len(turn.output_ids)
    tokens = np.concatenate((turn.prompt_ids, turn.output_ids))
    tokens.flags.writeable = False
    return trusted(
        Segment,
        {
            "tokens": tokens,
            "response_length": size,
            "loss_mask": np.frombuffer(b"\x01" * size, np.uint8),  # read-only as it is
            "log_probs": turn.log_probs,
            "versions": _joined(turn.versions),
            "text": turn.text,
            "extras": turn.extras,
        },
    )


def _joined(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    if len(spans) == 1:
        return (spans[0],)
    joined: list[VersionSpan] = []
    for start, stop, version in spans:
        _add_span(joined, start, stop, version)
    return tuple(joined)


def _add_span(spans: list[VersionSpan], start: int, stop: int, version: int) -> None:
    if spans and spans[-1].stop == start and spans[-1].version == version:
        spans[-1] = spans[-1]._replace(stop=stop)
    else:
        spans.append(VersionSpan(start, stop, version))


def status_of(stop: Stop) -> Status:
    """Return the status of a rollout whose last turn stopped for this reason."""
    if stop is Stop.STOP:
        return Status.COMPLETED
    return Status.TRUNCATED if stop is Stop.LENGTH else Status.ABORTED


def remaining(sampling: SamplingParams, parts: Sequence[Turn]) -> SamplingParams:
    """Return the sampling of the next part: ``max_new_tokens`` less the tokens of the parts."""
    sampled = _tokens(parts)
    return with_most_tokens(sampling, sampling.max_new_tokens - sampled, sampled=sampled)


def is_used_up(sampling: SamplingParams, parts: Sequence[Turn]) -> bool:
    """Return True if the parts have all the tokens that were asked for."""
    return _tokens(parts) >= sampling.max_new_tokens


def context_after(parts: Sequence[Turn]) -> np.ndarray:
    """Return the prompt of the next part: the first part's prompt and everything sampled since."""
    return np.concatenate([parts[0].prompt_ids, *(part.output_ids for part in parts)])


def merge(parts: Sequence[Turn], *, stop: Stop | None = None) -> Turn:
    """Merge the parts of a turn: ids, log-probs and version spans in order; the other fields are the last part's.

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
    """Return the empty turn that stands for a request whose prompt fills the context."""
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
