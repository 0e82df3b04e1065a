"""Decodes the JSON of a /generate answer, or of a part of one: fast for the usual form, exact for every other.

If the C extension was compiled, the tokens of a complete answer in the usual form go straight into arrays (FastAnswer). Every
other answer becomes a ParsedAnswer. Both are checked by the same code, and become the same Turn
(docs/decisions/0025-log-probs-are-decoded-natively-where-it-can-be-compiled.md).
"""

from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias

import attrs
import msgspec
import numpy as np

from ..._core.arrays import ID_MAX, FloatArray, IdArray

LOG_PROBS: Final = "output_token_logprobs"

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
"""A token id, as msgspec checks it."""


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """``[log_prob, token_id, text or null]``; the third element, present or not, is skipped unread."""

    log_prob: float
    token: int


_NULL: Final = b"null"
_Plain: TypeAlias = dict[str, Any] | str | int | float | bool | None


class _Fast(msgspec.Struct, gc=False):
    """An answer decoded in one pass. Any array of arrays in ``meta_info`` is taken for log-probs, which is checked afterwards.

    The ids stay raw: usually they are, to the letter, the ones that the log-probs name.
    """

    meta_info: dict[str, list[_Entry | _Plain] | _Plain]
    text: str | None = None
    output_ids: msgspec.Raw = msgspec.Raw(_NULL)
    prompt_token_ids: list[TokenId] | None = None


class _Exact(msgspec.Struct, gc=False):
    """An answer whose ``meta_info`` stays raw, value by value, so that each value can be decoded by its kind."""

    meta_info: dict[str, msgspec.Raw]
    text: str | None = None
    output_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None


@attrs.define
class ParsedAnswer:
    """An answer, decoded and not yet checked. ``log_probs`` and ``tokens`` are None if the answer has none."""

    meta: dict[str, Any]
    text: str
    output_ids: list[int]
    log_probs: list[float] | None
    tokens: list[int] | None
    """The token ids that the log-probs name; the same list as ``output_ids`` if they are known to be equal."""
    prompt_ids: list[int] | None

    def append(self, later: "ParsedAnswer") -> None:
        """Append the next part of an answer that comes in parts."""
        self.meta = later.meta
        self.text += later.text
        if self.tokens is not self.output_ids or later.tokens is not later.output_ids:
            self.tokens = [*(self.tokens or ()), *(later.tokens or ())]
        self.output_ids += later.output_ids
        self.log_probs = self.log_probs if self.log_probs is not None else []
        self.log_probs += later.log_probs or ()
        self.prompt_ids = self.prompt_ids or later.prompt_ids

    def cut(self, count: int) -> None:
        """Drop every token behind the first ``count``, with its log-prob."""
        for values in (self.output_ids, self.log_probs, self.tokens):
            if values is not None:
                del values[count:]


_decode_fast: Final = msgspec.json.Decoder(_Fast).decode
_decode_exact: Final = msgspec.json.Decoder(_Exact).decode
_decode_entries: Final = msgspec.json.Decoder(list[_Entry] | None).decode
_decode_ids: Final = msgspec.json.Decoder(list[TokenId] | None).decode
_decode_any: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


def parse_answer(body: bytes | memoryview) -> ParsedAnswer:
    """Decode an answer, or a part of one.

    Raises:
      msgspec.DecodeError: the body is not an answer; its subclass ValidationError names the place.
      RecursionError: something in it is nested too deeply.
    """
    try:
        answer = _decode_fast(body)
    except msgspec.ValidationError:
        return _decode_exactly(body)
    meta: dict[str, Any] = answer.meta_info
    entries = meta.pop(LOG_PROBS, None)
    for value in meta.values():
        if type(value) is list and any(type(item) is _Entry for item in value):
            return _decode_exactly(body)  # other arrays of arrays, which happen to look like log-probs
    if entries is None:
        return ParsedAnswer(
            meta, answer.text or "", _other_ids(bytes(answer.output_ids), []), None, None, answer.prompt_token_ids
        )
    try:
        log_probs = [entry.log_prob for entry in entries]
        tokens = [entry.token for entry in entries]
    except (TypeError, AttributeError):
        return _decode_exactly(body)  # it will say what is wrong
    raw = bytes(answer.output_ids)
    ids = tokens if raw in {_NULL, _encode(tokens)} else _other_ids(raw, tokens)
    return ParsedAnswer(meta, answer.text or "", ids, log_probs, tokens, answer.prompt_token_ids)


def _other_ids(raw: bytes, tokens: list[int]) -> list[int]:
    """Decode output ids that are not written as the log-probs' tokens would be: other ids, or the same with spaces."""
    try:
        ids = _decode_ids(raw)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"output_ids: {error}") from error
    return tokens if ids is None or ids == tokens else ids


def _decode_exactly(body: bytes | memoryview) -> ParsedAnswer:
    answer = _decode_exact(body)
    raw = answer.meta_info.pop(LOG_PROBS, None)
    try:
        entries = None if raw is None else _decode_entries(raw)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"meta_info.{LOG_PROBS}: {error}") from error
    meta = {name: _decode_any(value) for name, value in answer.meta_info.items()}
    tokens = None if entries is None else [entry.token for entry in entries]
    log_probs = None if entries is None else [entry.log_prob for entry in entries]
    ids = answer.output_ids if answer.output_ids is not None else tokens or []
    return ParsedAnswer(meta, answer.text or "", ids, log_probs, tokens, answer.prompt_token_ids)


try:
    from . import _triples
except ImportError:  # there was no compiler when it was installed
    cut: Callable[[bytes | memoryview], tuple[bytes, bytes, bytes] | None] | None = None
else:
    cut = _triples.cut


class _Rest(msgspec.Struct, gc=False):
    """The rest of a body whose tokens were cut out."""

    meta_info: dict[str, Any]
    text: str | None = None
    output_ids: None = None
    prompt_token_ids: list[TokenId] | None = None


@attrs.define
class FastAnswer:
    """An answer in the usual form: it has tokens and as many log-probs, and all ids are token ids."""

    meta: dict[str, Any]
    text: str
    output_ids: IdArray
    log_probs: FloatArray
    prompt_ids: list[int] | None


_decode_rest: Final = msgspec.json.Decoder(_Rest).decode


def decode_answer(body: bytes | memoryview) -> FastAnswer | ParsedAnswer:
    """Decode an answer. The choice between the two classes makes no difference to its Turn.

    Raises:
      msgspec.DecodeError: the body is not an answer; its subclass ValidationError names the place.
      RecursionError: something in it is nested too deeply.
    """
    if cut is None or (found := cut(body)) is None:
        return parse_answer(body)
    try:
        rest = _decode_rest(found[0])
    except msgspec.DecodeError:
        return parse_answer(body)  # it names the place in the whole body
    del rest.meta_info[LOG_PROBS]
    return FastAnswer(
        rest.meta_info,
        rest.text or "",
        np.frombuffer(found[2], np.int32),  # read-only, as bytes are
        np.frombuffer(found[1], np.float32),
        rest.prompt_token_ids,
    )
