"""A whole answer: where the C extension was compiled its tokens go straight into arrays, otherwise it is a Draft."""

from collections.abc import Callable
from typing import Any, Final

import attrs
import msgspec
import numpy as np

from ..._core.arrays import FloatArray, IdArray
from ._draft import LOG_PROBS, Draft, TokenId, decode_draft

try:
    from . import _triples
except ImportError:  # there was no compiler when it was installed
    cut: Callable[[bytes | memoryview], tuple[bytes, bytes, bytes] | None] | None = None
else:
    cut = _triples.cut


class _Rest(msgspec.Struct, gc=False):
    """What is left of a body whose tokens were cut out."""

    meta_info: dict[str, Any]
    text: str | None = None
    output_ids: None = None
    prompt_token_ids: list[TokenId] | None = None


@attrs.define
class Whole:
    """An answer in the usual form: there are tokens, as many log-probs, and all ids are token ids."""

    meta: dict[str, Any]
    text: str
    output_ids: IdArray
    log_probs: FloatArray
    prompt_ids: list[int] | None


_decode_rest: Final = msgspec.json.Decoder(_Rest).decode


def decode_whole(body: bytes | memoryview) -> Whole | Draft:
    """Decode an answer; which of the two it becomes says nothing about it, and makes no difference to its Turn.

    Raises:
      msgspec.DecodeError: it is none; ValidationError, which is one, names the place.
      RecursionError: something in it is nested too deeply.

    """
    if cut is None or (found := cut(body)) is None:
        return decode_draft(body)
    try:
        rest = _decode_rest(found[0])
    except msgspec.DecodeError:
        return decode_draft(body)  # it names the place in the whole body
    del rest.meta_info[LOG_PROBS]
    return Whole(
        rest.meta_info,
        rest.text or "",
        np.frombuffer(found[2], np.int32),  # read-only, as bytes are
        np.frombuffer(found[1], np.float32),
        rest.prompt_token_ids,
    )
