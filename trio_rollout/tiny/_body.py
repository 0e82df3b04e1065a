"""The JSON of ``/generate``: its body, decoded and checked by SGLang's names, types and ranges, and SGLang's error answers."""

import http
import math
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

from ._model.model import EVERY_TOKEN, Limits
from ._scheduler.request import Penalties, Sampling

_CLIENT_ERROR = 400


class Refusal(Exception):
    """A request is answered with an error. ``body`` is the JSON answer to a call that does not stream."""

    def __init__(self, message: str, *, status: int, body: dict[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.body = body

    @property
    def chunk(self) -> dict[str, Any]:
        """The error as the single chunk of a stream, whose HTTP status is 200."""
        error = {"message": str(self), "type": "invalid_request_error", "code": self.status, "retryable": False}
        return {"error": error}


def invalid(message: str) -> Refusal:
    """Return the error of a well-formed request that cannot be served: a bad value, too long, a rid that is active."""
    return Refusal(message, status=_CLIENT_ERROR, body={"error": {"message": message}})


def schema(message: str) -> Refusal:
    """Return the error of JSON of the wrong form: an unknown sampling key, a wrong type."""
    return Refusal(message, status=_CLIENT_ERROR, body={"error": message})


def malformed(message: str) -> Refusal:
    """Return the error of a body that is not JSON, or of a control call without the body that it needs."""
    phrase = http.HTTPStatus.BAD_REQUEST.phrase
    body = {"object": "error", "message": message, "type": phrase, "param": None, "code": _CLIENT_ERROR}
    return Refusal(message, status=_CLIENT_ERROR, body=body)


def unavailable(message: str, status: int) -> Refusal:
    """Return the error of a request that the scheduler ended: its queue is full."""
    body = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
    return Refusal(message, status=status, body=body)


class SamplingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """``sampling_params``. An unknown key is refused; None means the default."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = EVERY_TOKEN
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_new_tokens: int | None = 0
    n: int | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] = {}
    sampling_seed: int | None = None
    custom_params: Any = None
    beam_width: int | None = None
    watermark: Any = None
    choice: list[str] = []


class GenerateBody(msgspec.Struct, kw_only=True, gc=False):
    """The fields that this server reads; unknown ones are ignored, as in SGLang."""

    rid: str | list[str] | None = None
    text: str | list[str] | None = None
    input_ids: msgspec.Raw = msgspec.Raw(b"null")
    input_embeds: msgspec.Raw = msgspec.Raw(b"null")
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_hidden_states: bool | list[bool] | str | None = None
    stream: bool | None = False


_DECODER = msgspec.json.Decoder(GenerateBody)
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_FLAT = msgspec.json.Decoder(list[_Int64])
_NESTED = msgspec.json.Decoder(list[list[_Int64]])
# A value that pydantic would convert passes SGLang's first check and fails its second, whose answer has another shape.
_SECOND_CHECK = re.compile(r"`\$\.sampling_params[.\[]|Expected `bool[^`]*`, got `int`")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_SAMPLING_KEYS = ", ".join(f"`{name}`" for name in SamplingBody.__struct_fields__)
_NEST = re.compile(rb"\s*\[\s*\[")


def decode_generate(body: bytes) -> GenerateBody:
    """Decode the body of a call.

    Raises:
      Refusal: the body is not JSON, or not of this form.
    """
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown:
            raise schema(f"unknown field `{unknown['name']}`, expected one of {_SAMPLING_KEYS}") from error
        raise (schema if _SECOND_CHECK.search(str(error)) else malformed)(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(f"[{{'type': 'json_invalid', 'loc': ('body',), 'msg': {str(error)!r}}}]") from error


def decode_ids(raw: msgspec.Raw) -> tuple[list[list[int]] | None, bool]:
    """Return ``input_ids`` as a list of prompts, and True if it was one: ``[1, 2]`` is a single prompt, ``[[1], [2]]`` two.

    Raises:
      Refusal: ``input_ids`` is neither.
    """
    data = bytes(raw)
    try:
        if data == b"null":
            return None, False
        if _NEST.match(data):
            return _NESTED.decode(data), True
        return [_FLAT.decode(data)], False
    except msgspec.ValidationError as error:
        raise malformed(f"input_ids: {error}") from error


_GREEDY_BELOW = 1e-6
_MOST_STOPS = 32
_LONGEST_REGEX = 256
_INT64 = 2**63
_PENALTY = 2.0
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: math.isfinite(value) and value >= 0, "a non-negative finite number"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("min_p", lambda value: 0 <= value <= 1, "in [0, 1]"),
    ("top_k", lambda value: value == -1 or value >= 1, "-1 (disable) or at least 1"),
    ("frequency_penalty", lambda value: abs(value) <= _PENALTY, "in [-2, 2]"),
    ("presence_penalty", lambda value: abs(value) <= _PENALTY, "in [-2, 2]"),
    ("repetition_penalty", lambda value: 0 < value <= _PENALTY, "in (0, 2] (1.0 = no penalty)"),
    ("max_new_tokens", lambda value: value >= 0, "at least 0"),
    ("beam_width", lambda value: value >= 1, "at least 1"),
    ("sampling_seed", lambda value: -_INT64 <= value < _INT64, "in [-2**63, 2**63 - 1]"),
)


def checked(body: SamplingBody, *, vocab: int, eos_id: int | None, room: int) -> Sampling:
    """Return the sampling parameters, normalised as in SGLang; ``room`` replaces a ``max_new_tokens`` of null.

    Raises:
      Refusal: a value is out of its range, or needs a grammar.
    """
    for complaint in _complaints(body, vocab):
        raise invalid(complaint)
    temperature, top_k = _or(body.temperature, 1.0), _or(body.top_k, EVERY_TOKEN)
    if temperature < _GREEDY_BELOW:
        temperature, top_k = 1.0, 1
    stops = {*(body.stop_token_ids or ()), *(() if eos_id is None else (eos_id,))}
    return Sampling(
        max_new_tokens=_or(body.max_new_tokens, room),
        temperature=temperature,
        limits=Limits(
            top_k=EVERY_TOKEN if top_k == -1 else top_k, top_p=_or(body.top_p, 1.0), min_p=_or(body.min_p, 0.0)
        ),
        penalties=Penalties(
            frequency=_or(body.frequency_penalty, 0.0),
            presence=_or(body.presence_penalty, 0.0),
            repetition=_or(body.repetition_penalty, 1.0),
            min_new_tokens=_or(body.min_new_tokens, 0),
            logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
        ),
        stop=tuple(as_list(body.stop)),  # an empty one ends an answer after its first token
        stop_regex=tuple(as_list(body.stop_regex)),
        stop_ids=frozenset() if body.ignore_eos else frozenset(stops),
        skip_special_tokens=body.skip_special_tokens is not False,
        no_stop_trim=bool(body.no_stop_trim),
        seed=body.sampling_seed,
    )


def _regex_complaints(patterns: list[str]) -> Iterator[str]:
    if len(patterns) > _MOST_STOPS:
        yield f"at most {_MOST_STOPS} stop_regex patterns are allowed, got {len(patterns)}"
    for pattern in patterns:
        if (size := len(pattern.encode())) > _LONGEST_REGEX:
            yield f"stop_regex is {size} bytes, over the {_LONGEST_REGEX}-byte limit"
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"invalid stop_regex {pattern!r}: {error}"


def as_list(value: str | list[str] | None) -> list[str]:
    """Return the strings of a field that may be one string, many or none."""
    return [value] if isinstance(value, str) else value or []


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _complaints(body: SamplingBody, vocab: int) -> Iterator[str]:
    """Yield the errors of the values, in SGLang's words."""
    for name, allowed, words in _RANGES:
        value = getattr(body, name)
        if value is not None and not allowed(value):
            yield f"{name} must be {words}, got {value}."
    limit, least = body.max_new_tokens, _or(body.min_new_tokens, 0)
    if least < 0 or (limit is not None and least > limit):
        yield f"min_new_tokens must be in [0, max_new_tokens({limit})], got {least}."
    for token in body.logit_bias:
        if not token.isdigit() or int(token) >= vocab:
            yield f"logit_bias must has keys in [0, {vocab - 1}], got {token}."
    if (count := len(as_list(body.stop))) > _MOST_STOPS:
        yield f"at most {_MOST_STOPS} stop strings are allowed, got {count}"
    yield from _regex_complaints(as_list(body.stop_regex))
    if body.json_schema or body.regex or body.ebnf or body.structural_tag:
        yield (
            "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when the server is "
            "launched with --grammar-backend none"
        )
