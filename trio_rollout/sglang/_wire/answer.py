"""Makes the Turn of a /generate answer: every check that keeps a damaged answer from becoming a Turn.

Also decodes the further arrays (routed experts, top-p ids, …) that an answer has if its request asked for them.
"""

import binascii
import re
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..._core.arrays import ID_MAX, FloatArray, IdArray
from ..._core.enums import Stop
from ..._core.values import Turn, VersionSpan, trusted
from ..._http import BadResponse
from ...errors import ServerError
from .control import named
from .decoding import LOG_PROBS, FastAnswer, ParsedAnswer, decode_answer
from .errors import MALFORMED, error_of
from .request import GenerateRequest

_LARGEST: Final = sys.float_info.max
_FINISH: Final = "finish_reason"
_ABORTED: Final = re.compile(rb'"finish_reason"\s*:\s*\{\s*"type"\s*:\s*"abort"')
_STOPS: Final = {stop.value: stop for stop in Stop}
# A log-softmax in float32 may end a little above 0, in bfloat16 by somewhat more; a probability above 1.001 is damage.
HIGHEST_LOG_PROB: Final = 1e-3


class Asked(Protocol):
    """The request that an answer is for, and the meaning of the version names in the answer."""

    @property
    def attempted(self) -> str:
        """The beginning of every error's message."""
        ...

    @property
    def rid(self) -> str:
        """The request's id."""
        ...

    @property
    def request(self) -> GenerateRequest:
        """The request."""
        ...

    def version_of(self, name: object, /) -> int:
        """Return the version that a name in the answer stands for."""
        ...


def undecodable(error: Exception, body: bytes | memoryview) -> BadResponse:
    """Return the reason for which an answer can't be decoded."""
    return BadResponse(f"answered 200, but not with an answer: {error}; it begins {bytes(body[:80])!r}")


def damaged(asked: Asked, error: Exception, body: bytes | memoryview) -> ServerError:
    """Return the exception for an answer that can't be decoded."""
    return ServerError(f"{asked.attempted}: {undecodable(error, body)}")


def says_abort(body: bytes | memoryview) -> bool:
    """Return True if an answer says that its request was aborted. It is searched, not decoded, which is right for all of SGLang's."""
    return _ABORTED.search(body) is not None


def decode_turn(body: bytes | memoryview, asked: Asked) -> Turn:
    """Return the Turn of a /generate answer with status 200.

    Raises:
      ServerError: the answer is malformed or contradicts itself; the message names the field.
      ServerBusy, RequestRejected: the server ended the request itself, for a reason with an error status.
    """
    try:
        answer = decode_answer(body)
    except MALFORMED as error:
        raise damaged(asked, error, body) from error
    return turn_of(answer, asked)


def turn_of(answer: ParsedAnswer | FastAnswer, asked: Asked) -> Turn:
    """Return the Turn of a decoded answer that passes every check; raise as ``decode_turn`` does."""
    meta = answer.meta
    stop = _stop_of(meta, asked)
    if isinstance(answer, FastAnswer):
        ids, log_probs = answer.output_ids, answer.log_probs
    else:
        log_probs, ids = _log_probs(answer, asked, stop), _id_array(answer.output_ids, asked)
    count = len(log_probs)
    if meta.get("id", asked.rid) != asked.rid or (stop is not Stop.ABORT and meta.get("completion_tokens") != count):
        _check_record(meta, asked, count, stop)
    if count:
        _check_output(ids, log_probs, asked)
    spans = _spans(meta, count, asked) if count else ()
    prompt_ids = asked.request.prompt_ids
    if prompt_ids is None:
        prompt_ids = _prompt_ids(answer.prompt_ids, asked, is_empty=stop is Stop.ABORT and not count)
    try:
        extras = take_extras(meta, len(prompt_ids) + count - 1)
    except ValueError as error:
        raise ServerError(f"{asked.attempted}: {error}") from error
    return trusted(
        Turn,
        {
            "rid": asked.rid,
            "prompt_ids": prompt_ids,
            "output_ids": ids,
            "log_probs": log_probs,
            "text": answer.text,
            "stop": stop,
            "weight_version": spans[-1].version if spans else asked.version_of(named(meta.get("weight_version"))),
            "versions": spans,
            "cached_tokens": int(_number(meta.get("cached_tokens")) or 0),
            "queue_s": _number(meta.get("queue_time")),
            "latency_s": _number(meta.get("e2e_latency")),
            "meta_info": meta,
            "extras": extras,
        },
    )


def _id_array(ids: list[int], asked: Asked) -> IdArray:
    try:
        array = np.array(ids, np.int32)
    except OverflowError as error:
        raise ServerError(f"{asked.attempted}: an output token's id is out of range: {error}") from error
    if ids and int(np.maximum.reduce(array.view(np.uint32))) > ID_MAX:  # negative ids become huge
        raise ServerError(f"{asked.attempted}: an output token's id is {int(array.min())}, which is not a token id")
    return _read_only(array)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def _stop_of(meta: Mapping[str, Any], asked: Asked) -> Stop:
    reason = meta.get(_FINISH)
    try:
        stop = _STOPS[reason["type"]]  # type: ignore[index]  # of another type, it raises TypeError
    except (TypeError, KeyError) as error:
        expected = f"expected one of {sorted(_STOPS)} as its type"
        raise ServerError(f"{asked.attempted}: {_FINISH} is {reason!r}, {expected}") from error
    if stop is Stop.ABORT:
        status = reason.get("status_code") if isinstance(reason, dict) else None
        if isinstance(status, int) and status >= HTTPStatus.BAD_REQUEST:
            raise error_of(asked.attempted, status, str(meta[_FINISH].get("message", "")))
    return stop


def _log_probs(parsed: ParsedAnswer, asked: Asked, stop: Stop) -> FloatArray:
    """Return the log-prob of each output id. A request that sampled nothing has neither."""
    values, tokens, ids = parsed.log_probs, parsed.tokens, parsed.output_ids
    if values is None or tokens is None:
        if not ids and (stop is Stop.ABORT or parsed.meta.get("completion_tokens") == 0):
            return _read_only(np.empty(0, np.float32))
        raise ServerError(
            f"{asked.attempted}: meta_info.{LOG_PROBS} is missing although return_logprob was asked for; "
            "the server's configuration or a proxy drops it"
        )
    if len(ids) != len(values):
        counts = f"{len(ids)} output_ids but {len(values)} entries in meta_info.{LOG_PROBS}"
        raise ServerError(f"{asked.attempted}: {counts}")
    if ids is not tokens and ids != tokens:
        at = next(place for place, token in enumerate(tokens) if token != ids[place])
        names = f"output_ids[{at}] is {ids[at]}, but meta_info.{LOG_PROBS}[{at}] names {tokens[at]}"
        raise ServerError(f"{asked.attempted}: {names}")
    return _floats(values, asked)


def _floats(values: list[float], asked: Asked) -> FloatArray:
    with np.errstate(over="ignore"):  # it becomes an infinity, which JSON can't say
        array = np.array(values, np.float32)
    finite = np.isfinite(array)
    if not finite.all():
        at = int(np.argmin(finite))
        raise ServerError(f"{asked.attempted}: meta_info.{LOG_PROBS}[{at}] is {values[at]}, which is not a float32")
    return _read_only(array)


def _check_output(ids: IdArray, log_probs: FloatArray, asked: Asked) -> None:
    """Refuse tokens that cannot be the answer to this request: too many, outside the vocabulary, or likelier than certain."""
    terms = asked.request.terms
    if terms.most is not None and len(ids) > terms.most:
        raise ServerError(f"{asked.attempted}: output_ids has {len(ids)} tokens, allowed: max_new_tokens {terms.most}")
    at = int(log_probs.argmax())  # of NaN, if there is one; a third of the time that the maximum takes
    if not log_probs.item(at) <= HIGHEST_LOG_PROB:
        raise ServerError(f"{asked.attempted}: meta_info.{LOG_PROBS}[{at}] is {log_probs[at]}, allowed: at most 0")
    check_vocabulary("output_ids", ids, asked)


def check_vocabulary(field: str, ids: IdArray, asked: Asked) -> None:
    """Raise ServerError if one of the ids is outside the vocabulary, as far as its size is known."""
    size = asked.request.terms.vocab_size
    if size is not None and len(ids) and ids.item(at := int(ids.argmax())) >= size:
        raise ServerError(
            f"{asked.attempted}: {field}[{at}] is {ids[at]}, allowed: 0 to below the vocabulary's size {size}"
        )


def _check_record(meta: Mapping[str, Any], asked: Asked, count: int, stop: Stop) -> None:
    if meta.get("id", asked.rid) != asked.rid:
        raise ServerError(f"{asked.attempted}: the answer is for request {meta['id']!r}, not for {asked.rid!r}")
    claimed = meta.get("completion_tokens")
    if stop is not Stop.ABORT and isinstance(claimed, int) and claimed != count:
        raise ServerError(f"{asked.attempted}: meta_info.completion_tokens is {claimed}, but {count} tokens came")


def _spans(meta: Mapping[str, Any], count: int, asked: Asked) -> tuple[VersionSpan, ...]:
    """Return the versions over ``[0, count)``. The last one is stretched to the end: one more step may land after an abort."""
    said = meta.get("weight_versions")
    if not said:
        return (VersionSpan(0, count, asked.version_of(named(meta.get("weight_version")))),)
    spans: list[VersionSpan] = []
    try:
        for item in said:
            start, stop = min(int(item["start"]), count), min(int(item["end"]), count)
            if start != (spans[-1].stop if spans else 0) or stop < start:
                raise ServerError(f"{asked.attempted}: meta_info.weight_versions do not tile the output: {said!r}")
            if stop > start:
                spans.append(VersionSpan(start, stop, asked.version_of(named(item["version"]))))
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ServerError(f"{asked.attempted}: meta_info.weight_versions is malformed: {said!r}") from error
    if not spans:
        raise ServerError(f"{asked.attempted}: meta_info.weight_versions cover no token: {said!r}")
    last = spans[-1]
    if last.stop != count:
        spans[-1] = VersionSpan(last.start, count, last.version)
    return tuple(spans)


def _number(value: object) -> float | None:
    """Return a number of the server's record; None if it is not a number, or too large for a float."""
    if type(value) is not float and type(value) is not int:  # what JSON has: no bool, no other kind of number
        return None
    return float(value) if -_LARGEST <= value <= _LARGEST else None


def _prompt_ids(ids: list[int] | None, asked: Asked, *, is_empty: bool) -> IdArray:
    """Return the ids of a text prompt. An answer that is empty, because it was aborted before the text became ids, has none."""
    if ids or is_empty:
        prompt_ids = _read_only(np.array(ids or (), np.int32))
        check_vocabulary("prompt_token_ids", prompt_ids, asked)
        return prompt_ids
    raise ServerError(
        f"{asked.attempted}: prompt_token_ids is missing although the prompt was text; "
        "give open_sglang_servers a tokenizer"
    )


Array: TypeAlias = npt.NDArray[Any]

_NONE: Final[Mapping[str, Array]] = {}


def _packed(value: Any) -> Array:
    """Decode base64 of int32 numbers, in which SGLang sends arrays with many numbers for each token."""
    if isinstance(value, str):
        return np.frombuffer(binascii.a2b_base64(value, strict_mode=True), np.dtype("<i4"))
    return np.asarray(value, np.int32)


def _numbers(value: Any) -> Array:
    return np.asarray(value, np.int32)


def _prompt_log_probs(value: Any) -> Array:
    """Return the log-probs of ``[log_prob, token_id, text]`` triples; NaN for the first token of a prompt, which has none."""
    return np.array([np.nan if entry[0] is None else entry[0] for entry in value], np.float32)


_DECODERS: Final[Mapping[str, tuple[str, Callable[[Any], Array]]]] = {
    "routed_experts": ("routed_experts", _packed),
    "indexer_topk": ("indexer_topk", _packed),
    "top_p_token_ids": ("top_p_token_ids", _numbers),
    "top_p_token_offsets": ("top_p_token_offsets", _numbers),
    "input_token_logprobs": ("prompt_log_probs", _prompt_log_probs),
}
"""For each name in ``meta_info``, the name among the extras and the decoder."""


def take_extras(meta: dict[str, Any], rows: int) -> Mapping[str, Array]:
    """Take the known arrays out of ``meta``. ``rows``: the number of rows of tables with a row for every token but the last.

    Raises:
      ValueError: one of them can't be decoded; the message names it.
    """
    if _DECODERS.keys().isdisjoint(meta):
        return _NONE
    extras: dict[str, Array] = {}
    for field, (name, decode) in _DECODERS.items():
        value = meta.pop(field, None)
        if value is None or value == []:
            continue
        try:
            array = decode(value)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise ValueError(f"meta_info.{field} can't be decoded: {error}") from error
        if decode is _packed and rows > 0 and array.ndim == 1 and array.size % rows == 0:
            array = array.reshape(rows, -1)
        array.flags.writeable = False
        extras[name] = array
    return extras
