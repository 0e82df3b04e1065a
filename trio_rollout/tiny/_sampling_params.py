"""Sampling parameters, checked and normalised as SGLang does it."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from ._body import SamplingBody
from ._refusal import invalid
from ._request import Penalties, Sampling
from ._sampler import EVERY_TOKEN, Limits

_GREEDY_BELOW = 1e-6
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
)


def checked(body: SamplingBody, *, vocab: int, eos_id: int | None, room: int) -> Sampling:
    """The sampling parameters, normalised as SGLang does it; ``room`` is used where ``max_new_tokens`` is null.

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
        stop=tuple(one for one in _list(body.stop) if one),
        stop_regex=tuple(_list(body.stop_regex)),
        stop_ids=frozenset() if body.ignore_eos else frozenset(stops),
        skip_special_tokens=body.skip_special_tokens is not False,
        no_stop_trim=bool(body.no_stop_trim),
        seed=body.sampling_seed,
    )


def _list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _complaints(body: SamplingBody, vocab: int) -> Iterator[str]:
    """What is wrong with the values, in SGLang's words."""
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
    for pattern in _list(body.stop_regex):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"invalid stop_regex {pattern!r}: {error}"
    if body.json_schema or body.regex or body.ebnf or body.structural_tag:
        yield (
            "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when the server is "
            "launched with --grammar-backend none"
        )
