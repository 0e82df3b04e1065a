"""One request as the scheduler sees it: prompt, limits, tokens so far, and the reason of its end. No I/O, no clock."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

from .._model.model import Limits

FinishReason: TypeAlias = dict[str, Any]
"""``finish_reason`` as it goes over the wire."""

Ranked: TypeAlias = list[tuple[float, int, None]] | None
"""Log-probs of several tokens at one place; None before the first token."""

ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}
QUEUE_FULL: FinishReason = {"type": "abort", "status_code": 503, "message": "The request queue is full."}


@attrs.frozen(kw_only=True)
class Penalties:
    """Changes of the logits: penalties for tokens that a request has already sampled, and biases."""

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)

    @property
    def any(self) -> bool:
        """True if the logits are changed."""
        return self != Penalties()


@attrs.frozen(kw_only=True)
class Sampling:
    """The sampling parameters of a request, checked, with SGLang's defaults filled in."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    limits: Limits = attrs.field(factory=Limits)
    penalties: Penalties = attrs.field(factory=Penalties)
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """With the end token; empty with ``ignore_eos``, which in SGLang disables ``stop_token_ids`` too."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int | None = None


@attrs.frozen(kw_only=True)
class Wanted:
    """The parts of the answer that were asked for besides text and ids."""

    log_probs: bool = False
    log_probs_from: int = -1
    """The first prompt token that is scored; -1: none."""
    top: int = 0
    token_ids: tuple[int, ...] = ()
    texts: bool = False
    prompt_ids: bool = False
    stream: bool = False


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Request:
    """A request from its arrival in the queue to its end. Only the scheduler changes it."""

    rid: str
    prompt: npt.NDArray[np.int64]
    sampling: Sampling
    wanted: Wanted = attrs.field(factory=Wanted)
    seed: int = 0
    forced: tuple[int, ...] = ()
    """A script's answer: these tokens come first, in place of sampled ones."""

    output_ids: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    top: list[Ranked] = attrs.field(factory=list)
    chosen: list[Ranked] = attrs.field(factory=list)
    input_log_probs: list[float | None] = attrs.field(factory=list)
    input_top: list[Ranked] = attrs.field(factory=list)
    input_chosen: list[Ranked] = attrs.field(factory=list)
    tail: bytes = b""
    """The last bytes of the output, as many as a stop string could need."""
    cached_tokens: int = 0
    retractions: int = 0
    version_changes: list[tuple[str, int]] = attrs.field(factory=list)
    """(version until the change, number of output tokens at the change)."""
    last_version: str = ""
    """The server's version when the request ended."""
    aborting: bool = False
    finish: FinishReason | None = None
    in_queue: bool = False
    """True if the request did not end by a decode step: its ``meta_info`` is shorter."""

    def __repr__(self) -> str:
        state = "aborting" if self.aborting else "live" if self.finish is None else self.finish["type"]
        return f"<Request {self.rid} {self.prompt.size}+{len(self.output_ids)} tokens, {state}>"

    def end(self, finish: FinishReason, version: str, *, in_queue: bool = False) -> None:
        """End the request; ``version`` is the server's."""
        self.finish, self.last_version, self.in_queue = finish, version, in_queue

    def spans(self, current: str) -> list[dict[str, Any]]:
        """Return the weight version of each run of output tokens; one empty span if there are none."""
        count = len(self.output_ids)
        spans: list[dict[str, Any]] = []
        for version, end in [*self.version_changes, (current, count)]:
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans


_REGEX_TOKENS = 256
"""Tokens in which a stop pattern is searched; SGLang bounds them by the pattern's longest match."""

_LONGEST_CHARACTER = 4


def stop_reason(request: Request, piece: Callable[[int], bytes]) -> FinishReason | None:
    """Return the reason to end after the newest token, or None. Strings come before ids, ids before the length, as in SGLang."""
    sampling, token = request.sampling, request.output_ids[-1]
    if sampling.stop:
        matched = _stop_string(request, piece(token))
        if matched is not None:
            return {"type": "stop", "matched": matched}
    if sampling.stop_regex:
        tail = b"".join(piece(one) for one in request.output_ids[-_REGEX_TOKENS:]).decode("utf-8", "replace")
        for pattern in sampling.stop_regex:
            if re.search(pattern, tail):
                return {"type": "stop", "matched": pattern}
    if token in sampling.stop_ids:
        return {"type": "stop", "matched": token}
    if len(request.output_ids) >= sampling.max_new_tokens:
        return {"type": "length", "length": sampling.max_new_tokens}
    return None


def _stop_string(request: Request, new: bytes) -> str | None:
    """Search the decoded text, as a client sees it: U+FFFD matches bytes that are not UTF-8."""
    stops, data = request.sampling.stop, request.tail + new
    keep = max(len(stop.encode()) for stop in stops) + _LONGEST_CHARACTER
    request.tail = data[-keep:]
    text = data.decode("utf-8", "replace")
    return next((stop for stop in stops if stop in text), None)


def may_become_stop(text: str, stops: tuple[str, ...]) -> bool:
    """Return True if ``text`` ends in the beginning of a stop string: a stream holds it back, as it may be trimmed."""
    return any(text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop) + 1))


def trimmed(text: str, finish: FinishReason) -> str:
    """Return ``text`` up to the stop string that ended it."""
    matched = finish.get("matched")
    place = text.find(matched) if isinstance(matched, str) else -1
    return text if place < 0 else text[:place]
