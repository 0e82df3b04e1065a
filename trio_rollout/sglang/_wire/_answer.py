"""A /generate answer as a Turn: every check that keeps a damaged one from becoming one."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import attrs
import msgspec
import numpy as np

from ..._core.arrays import FloatArray, IdArray
from ..._core.enums import Stop
from ..._core.values import Turn, VersionSpan
from ...errors import ServerError
from ._draft import LOG_PROBS, Draft, decode_draft
from ._errors import error_of
from ._request import GenerateRequest

VersionOf: TypeAlias = Callable[[object], int]
"""What a version's name in an answer stands for, as a number."""

_FINISH: Final = "finish_reason"
_STOPS: Final = {stop.value: stop for stop in Stop}
_FIRST_ERROR: Final = 400


def _ids(values: list[int]) -> IdArray:
    ids = np.array(values, np.int32)
    ids.flags.writeable = False
    return ids


def _stop_of(meta: Mapping[str, Any], attempted: str) -> Stop:
    reason = meta.get(_FINISH)
    kind = reason.get("type") if isinstance(reason, dict) else None
    stop = _STOPS.get(kind) if isinstance(kind, str) else None
    if stop is None:
        raise ServerError(f"{attempted}: {_FINISH} is {reason!r}, expected one of {sorted(_STOPS)} as its type")
    status = reason.get("status_code") if stop is Stop.ABORT and isinstance(reason, dict) else None
    if isinstance(status, int) and status >= _FIRST_ERROR:
        raise error_of(attempted, status, str(reason.get("message", "") if isinstance(reason, dict) else ""))
    return stop


def _log_probs(draft: Draft, *, aborted: bool, attempted: str) -> FloatArray:
    """The log-probs, once they belong to the output ids one by one."""
    values, tokens, ids = draft.log_probs, draft.tokens, draft.output_ids
    if values is None or tokens is None:
        if aborted and not ids:  # aborted in the queue: nothing was sampled
            return np.empty(0, np.float32)
        raise ServerError(
            f"{attempted}: meta_info.{LOG_PROBS} is missing although return_logprob was asked for; "
            "the server's configuration or a proxy drops it"
        )
    if len(ids) != len(values):
        raise ServerError(f"{attempted}: {len(ids)} output_ids but {len(values)} entries in meta_info.{LOG_PROBS}")
    if ids != tokens:
        at = next(place for place, token in enumerate(tokens) if token != ids[place])
        raise ServerError(
            f"{attempted}: output_ids[{at}] is {ids[at]}, but meta_info.{LOG_PROBS}[{at}] names {tokens[at]}"
        )
    log_probs = np.array(values, np.float32)
    log_probs.flags.writeable = False
    return log_probs


def _spans(meta: Mapping[str, Any], count: int, version_of: VersionOf, attempted: str) -> tuple[VersionSpan, ...]:
    """Versions over ``[0, count)``; the last one is stretched to the end, since one more step may land after an abort."""
    if not count:
        return ()
    named = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    spans: list[VersionSpan] = []
    try:
        for item in named:
            start, stop = min(int(item["start"]), count), min(int(item["end"]), count)
            if start != (spans[-1].stop if spans else 0) or stop < start:
                raise ServerError(f"{attempted}: meta_info.weight_versions do not tile the output: {named!r}")
            if stop > start:
                spans.append(VersionSpan(start, stop, version_of(item["version"])))
    except (TypeError, KeyError, ValueError) as error:
        raise ServerError(f"{attempted}: meta_info.weight_versions is malformed: {named!r}") from error
    if not spans:
        raise ServerError(f"{attempted}: meta_info.weight_versions cover no token: {named!r}")
    last = spans[-1]
    spans[-1] = VersionSpan(last.start, count, last.version)
    return tuple(spans)


def _check_record(meta: Mapping[str, Any], rid: str, count: int, stop: Stop, attempted: str) -> None:
    if meta.get("id", rid) != rid:
        raise ServerError(f"{attempted}: the answer is for request {meta['id']!r}, not for {rid!r}")
    claimed = meta.get("completion_tokens")
    if stop is not Stop.ABORT and isinstance(claimed, int) and claimed != count:
        raise ServerError(f"{attempted}: meta_info.completion_tokens is {claimed}, but {count} tokens came")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@attrs.define(kw_only=True)  # frozen costs a call for each field
class Asked:
    """What was asked, and how to read the answer. ``attempted`` begins the message of every error."""

    attempted: str
    rid: str
    request: GenerateRequest
    version_of: VersionOf


def damaged(asked: Asked, error: msgspec.DecodeError, body: bytes | memoryview) -> ServerError:
    """The exception for an answer that can't be decoded."""
    start = bytes(body[:80])
    return ServerError(f"{asked.attempted}: answered 200 with what is no answer: {error}; it begins {start!r}")


def decode_turn(body: bytes | memoryview, asked: Asked) -> Turn:
    """The Turn of a /generate answer with status 200.

    Raises:
      ServerError: it is malformed or contradicts itself; the message names the field.
      ServerBusy, RequestRejected: the server ended the request itself, for a reason with an error status.

    """
    try:
        draft = decode_draft(body)
    except msgspec.DecodeError as error:  # ValidationError is one of them
        raise damaged(asked, error, body) from error
    return turn_of(draft, asked)


def turn_of(draft: Draft, asked: Asked) -> Turn:
    """The Turn of a decoded answer, once it has passed every check; raises as ``decode_turn`` does."""
    attempted, meta = asked.attempted, draft.meta
    stop = _stop_of(meta, attempted)
    log_probs = _log_probs(draft, aborted=stop is Stop.ABORT, attempted=attempted)
    count = len(log_probs)
    _check_record(meta, asked.rid, count, stop, attempted)
    spans = _spans(meta, count, asked.version_of, attempted)
    return Turn(
        rid=asked.rid,
        prompt_ids=_prompt_ids(draft, asked.request, stop, attempted),
        output_ids=_ids(draft.output_ids),
        log_probs=log_probs,
        text=draft.text,
        stop=stop,
        weight_version=spans[-1].version if spans else asked.version_of(meta.get("weight_version")),
        versions=spans,
        cached_tokens=int(_number(meta.get("cached_tokens")) or 0),
        queue_s=_number(meta.get("queue_time")),
        latency_s=_number(meta.get("e2e_latency")),
        meta_info=meta,
    )


def _prompt_ids(draft: Draft, request: GenerateRequest, stop: Stop, attempted: str) -> IdArray:
    if request.prompt_ids is not None:
        return request.prompt_ids
    if draft.prompt_ids is not None:
        return _ids(draft.prompt_ids)
    if stop is Stop.ABORT:  # aborted before the text became ids
        return _ids([])
    raise ServerError(
        f"{attempted}: prompt_token_ids is missing although the prompt was text; give open_sglang_servers a tokenizer"
    )
