"""Sampling parameters, named and defined as SGLang names them, with the range of each.

A value outside its range is refused when it is given. A server would answer it with an error at best: an empty stop string ends
every answer after one token, an infinite temperature is sent as null and means 1, and a stop token outside the vocabulary kills
a real SGLang if ``min_new_tokens`` is given too.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from ..errors import SettingsError
from .arrays import ID_MAX
from .checks import is_whole, names_suggested

_INT64: Final = 2**63
_PENALTY: Final = 2.0


# --- ranges


@attrs.frozen
class _Range:
    holds: Callable[[Any], bool]
    allowed: str


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_strings(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)


def _is_regex(value: object) -> bool:
    try:
        patterns = (value,) if isinstance(value, str) else value
        return _is_strings(patterns) and all(re.compile(pattern) for pattern in patterns)  # type: ignore[attr-defined]
    except re.error:
        return False


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(token, str) and token.isascii() and token.isdigit() and _is_number(bias)
        for token, bias in value.items()
    )


def _is_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(is_whole(item, 0) and item <= ID_MAX for item in value)


def _from(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and low <= value <= high


def _whole(low: int, high: int = ID_MAX) -> Callable[[Any], bool]:
    return lambda value: is_whole(value, low) and value <= high


_STRINGS: Final = _Range(_is_strings, "strings that are not empty")
_BOOL: Final = _Range(lambda value: isinstance(value, bool), "True or False")
_TEXT: Final = _Range(lambda value: isinstance(value, str), "a string")
_SIGNED: Final = _Range(_from(-_PENALTY, _PENALTY), "a number in [-2, 2]")

NAMED: Final[Mapping[str, _Range]] = {
    "max_new_tokens": _Range(_whole(0), f"an integer in [0, {ID_MAX}]"),
    "temperature": _Range(_from(0.0), "a finite number >= 0"),
    "top_p": _Range(lambda value: _is_number(value) and 0 < value <= 1, "a number in (0, 1]"),
    "top_k": _Range(lambda value: _whole(-1)(value) and value != 0, "-1 (every token) or an integer >= 1"),
    "min_p": _Range(_from(0.0, 1.0), "a number in [0, 1]"),
    "stop": _STRINGS,
    "stop_token_ids": _Range(_is_ids, f"integers in [0, {ID_MAX}]"),
    "ignore_eos": _BOOL,
    "skip_special_tokens": _BOOL,
    "sampling_seed": _Range(
        lambda value: value is None or _whole(-_INT64, _INT64 - 1)(value), "None or an integer in [-2**63, 2**63 - 1]"
    ),
}
"""The ranges of the fields of SamplingParams."""

FURTHER: Final[Mapping[str, _Range]] = {
    "min_new_tokens": _Range(_whole(0), "an integer >= 0"),
    "frequency_penalty": _SIGNED,
    "presence_penalty": _SIGNED,
    "repetition_penalty": _Range(lambda value: _is_number(value) and 0 < value <= _PENALTY, "a number in (0, 2]"),
    "stop_regex": _Range(_is_regex, "regular expressions that are not empty"),
    "logit_bias": _Range(_is_bias, "finite numbers by token id, the ids as strings of digits"),
    "n": _Range(_whole(1, 1), "1: one request is one answer"),
    "beam_width": _Range(_whole(1), "an integer >= 1"),
    "stream_interval": _Range(_whole(1), "an integer >= 1"),
    "no_stop_trim": _BOOL,
    "spaces_between_special_tokens": _BOOL,
    "json_schema": _TEXT,
    "regex": _TEXT,
    "ebnf": _TEXT,
    "structural_tag": _TEXT,
}
"""The ranges of SGLang's further parameters, which ``extra`` may have. None means the server's default there."""


def check_finite(value: object, where: str) -> None:
    """Refuse a float that JSON cannot say, at any depth: it would be sent as null.

    Raises:
      SettingsError: names the place and the value.
    """
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        raise SettingsError(
            f"{where}: got {value!r}, allowed: finite numbers, because JSON would have null in its place"
        )
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = value.tolist()
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_finite(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            check_finite(item, f"{where}[{place}]")


# --- converters: what is a value of the right kind in another type. Everything else is left for the ranges to refuse.


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int | float | np.number) and not isinstance(value, bool) else value


def _integer(value: Any) -> Any:
    if isinstance(value, bool | np.bool_ | float | np.floating):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _flag(value: Any) -> Any:
    return bool(value) if isinstance(value, np.bool_) else value


def _seed(value: Any) -> Any:
    return None if value is None else _integer(value)


def _tuple(value: Any, convert: Callable[[Any], Any]) -> Any:
    if value is None:
        return ()
    return tuple(map(convert, value)) if isinstance(value, Iterable) and not isinstance(value, bytes) else value


def _strings(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _tuple(value, lambda item: item)


def _ids(value: Any) -> Any:
    return _tuple(value, _integer)


def _mapping(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


_CONVERT: Final[Mapping[str, Callable[[Any], Any]]] = {
    "max_new_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "stop": _strings,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "sampling_seed": _seed,
}


def _refuse(where: str, value: object, allowed: str) -> None:
    raise SettingsError(f"SamplingParams.{where}: got {value!r}, allowed: {allowed}")


def _in_range(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    name = attribute.name
    if not NAMED[name].holds(value):
        _refuse(name, value, NAMED[name].allowed)


def _check_extra(_instance: "SamplingParams", _attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not value and isinstance(value, dict):
        return
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        _refuse("extra", value, "a mapping whose keys are strings")
    for name, item in value.items():
        found = FURTHER.get(name)
        if found is not None and item is not None and not found.holds(item):
            _refuse(f"extra[{name!r}]", item, found.allowed)
    check_finite({name: item for name, item in value.items() if name not in NAMED}, "SamplingParams.extra")


@names_suggested
@attrs.frozen(kw_only=True)
class SamplingParams:
    """The sampling parameters of one turn.

    ``temperature`` in [0, 1e-6) is greedy; ``top_k=-1`` keeps every token. ``extra`` is sent as it is (``regex``,
    ``json_schema``, ``logit_bias``, …); a field of this class in it replaces that field.

    Raises:
      SettingsError: a field, or one of SGLang's parameters in ``extra``, is out of its range; the message names the field, the
        value and the range.
    """

    max_new_tokens: int = attrs.field(default=128, converter=_integer, validator=_in_range)
    temperature: float = attrs.field(default=1.0, converter=_number, validator=_in_range)
    top_p: float = attrs.field(default=1.0, converter=_number, validator=_in_range)
    top_k: int = attrs.field(default=-1, converter=_integer, validator=_in_range)
    min_p: float = attrs.field(default=0.0, converter=_number, validator=_in_range)
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_in_range)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids, validator=_in_range)
    ignore_eos: bool = attrs.field(default=False, converter=_flag, validator=_in_range)
    skip_special_tokens: bool = attrs.field(default=True, converter=_flag, validator=_in_range)
    sampling_seed: int | None = attrs.field(default=None, converter=_seed, validator=_in_range)
    extra: Mapping[str, object] = attrs.field(factory=dict, converter=_mapping, validator=_check_extra)

    def __attrs_post_init__(self) -> None:
        if not self.extra or NAMED.keys().isdisjoint(self.extra):
            return
        extra = dict(self.extra)
        for name in NAMED.keys() & extra.keys():
            value = _CONVERT[name](extra.pop(name))
            if not NAMED[name].holds(value):
                _refuse(f"extra[{name!r}]", value, NAMED[name].allowed)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "extra", extra)


def with_most_tokens(sampling: SamplingParams, most: int, *, sampled: int = 0) -> SamplingParams:
    """Return the parameters for the rest of an answer: at most so many tokens, behind those that were ``sampled`` before."""
    least = sampling.extra.get("min_new_tokens")
    if isinstance(least, int):
        extra = {**sampling.extra, "min_new_tokens": min(max(0, least - sampled), most)}
        return attrs.evolve(sampling, max_new_tokens=most, extra=extra)
    return attrs.evolve(sampling, max_new_tokens=most)
