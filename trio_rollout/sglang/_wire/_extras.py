"""Arrays that an answer brings besides ids and log-probs, when its request asked for them, as numpy."""

import binascii
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_NONE: Final[Mapping[str, Array]] = {}


def _packed(value: Any) -> Array:
    """Base64 of int32 numbers: how SGLang sends what has many numbers a token."""
    if isinstance(value, str):
        return np.frombuffer(binascii.a2b_base64(value, strict_mode=True), np.dtype("<i4"))
    return np.asarray(value, np.int32)


def _numbers(value: Any) -> Array:
    return np.asarray(value, np.int32)


def _prompt_log_probs(value: Any) -> Array:
    """Of ``[log_prob, token_id, text]`` triples; NaN for the first token of a prompt, which has none."""
    return np.array([np.nan if entry[0] is None else entry[0] for entry in value], np.float32)


_DECODERS: Final[Mapping[str, tuple[str, Callable[[Any], Array]]]] = {
    "routed_experts": ("routed_experts", _packed),
    "indexer_topk": ("indexer_topk", _packed),
    "top_p_token_ids": ("top_p_token_ids", _numbers),
    "top_p_token_offsets": ("top_p_token_offsets", _numbers),
    "input_token_logprobs": ("prompt_log_probs", _prompt_log_probs),
}
"""Name in ``meta_info``: name among the extras, and how to decode it."""


def take_extras(meta: dict[str, Any], rows: int) -> Mapping[str, Array]:
    """Take the known arrays out of ``meta``. ``rows``: of the tables with a row for every token but the last.

    Raises:
      ValueError: one of them is none; the message names it.

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
