"""A streamed /generate answer: decodes server-sent events into the Turn, or into the tokens that came before a break.

By default each of SGLang's events repeats the answer so far. A server that was started with
``--incremental-streaming-output`` sends only the new part in each event. The first two events with tokens show which of the two
it is. Of events that repeat the answer only the newest is kept and only the last is decoded: decoding each would be quadratic.

A stream ends early, with BadResponse, at the first event that cannot be a part of the answer, and when it sends more than an
answer to its request can need: tokens, events, or bytes that are no event.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import msgspec

from ..._core.arrays import ID_MAX
from ..._core.values import Turn
from ..._http import BadResponse
from ...errors import ServerError
from .answer import Asked, damaged, turn_of, undecodable
from .decoding import FastAnswer, ParsedAnswer, decode_answer, parse_answer
from .errors import MALFORMED, error_of, words_of
from .request import GenerateRequest

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_UNKNOWN_STATUS: Final = 500
# An event brings at least one token, but for the first and the last one, and what is sent again after a retraction.
_FURTHER_EVENTS: Final = 1024
# Comments that keep a connection open are a few bytes every few seconds.
_SILENCE_BYTES: Final = 1 << 20


def ignore_progress() -> None:
    """Do nothing: the callback of a stream that is not watched."""


class _Ids(msgspec.Struct):
    """The part of an answer that says which tokens have come."""

    output_ids: list[int] = []


@final
class StreamDecoder:
    """Decodes the stream of one answer.

    ``on_progress`` is called for each event that brings something new, ``on_tokens`` with all ids so far.
    """

    def __init__(
        self,
        request: GenerateRequest,
        on_progress: Callable[[], None] = ignore_progress,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.on_progress = on_progress
        self.on_tokens = on_tokens
        self.done = False
        self._request = request
        self._most = ID_MAX if request.terms.most is None else request.terms.most
        self._lines = bytearray()
        self._events = self._silence = 0
        self._newest = b""
        self._parts: ParsedAnswer | None = None
        self._repeats: bool | None = None
        self._refusal: bytes | None = None

    @property
    def newest(self) -> bytes:
        """The newest event, not decoded yet, of a stream whose events repeat the answer; empty for any other stream."""
        return self._newest

    def feed(self, data: bytes) -> None:
        """Accept bytes of the stream, cut anywhere.

        Raises:
          BadResponse: they cannot be a part of the answer to this request, or there are too many of them.

        Exceptions of the two callbacks come out as they are; what was fed counts as accepted.
        """
        self._lines += data
        if b"\n" not in data:
            if len(self._lines) > self._request.answer_limit:
                raise BadResponse(f"an event of the stream is longer than {self._request.answer_limit} bytes")
            return
        *lines, rest = self._lines.split(b"\n")
        self._lines = rest
        for line in lines:
            if line.startswith(_DATA) and not self.done:  # other lines are comments, names and blank ones
                self._event(bytes(line[len(_DATA) :].strip()))
            else:
                self._note_silence(len(line) + 1)

    def _note_silence(self, size: int) -> None:
        self._silence += size
        if self._silence > _SILENCE_BYTES:
            raise BadResponse(f"the stream sent more than {_SILENCE_BYTES} bytes without anything new")

    def _event(self, payload: bytes) -> None:
        if payload == _DONE:
            self.done = True
        elif self._refusal is not None:
            self._note_silence(len(payload))
        elif payload.startswith(b'{"error"'):
            self._refusal = payload
        elif payload == self._newest:
            self._note_silence(len(payload))
        else:
            self._note_event(payload)

    def _note_event(self, payload: bytes) -> None:
        self._events += 1
        if self._events > self._most + _FURTHER_EVENTS:
            raise BadResponse(f"the stream has more than {self._events - 1} events for {self._most} tokens")
        before = self._parts
        count = 0 if before is None else len(before.output_ids)
        if self._repeats:
            self._newest = payload
        else:
            self._decode(payload)
        if self._parts is not None and len(self._parts.output_ids) == count:
            self._note_silence(len(payload))
            return
        self._silence = 0
        self._tell()

    def _tell(self) -> None:
        self.on_progress()
        if self.on_tokens is not None and (ids := self._ids_so_far()):
            self.on_tokens(ids)

    def _ids_so_far(self) -> Sequence[int]:
        if not self._repeats:
            return tuple(self._parts.output_ids) if self._parts is not None else ()
        try:
            ids = msgspec.json.decode(self._newest, type=_Ids).output_ids
        except MALFORMED as error:
            raise undecodable(error, self._newest) from error
        self._check(ids, len(ids))
        return ids

    def _check(self, ids: Sequence[int], so_far: int) -> None:
        """Refuse ids that the end of the stream would refuse, before the callback has them."""
        if so_far > self._most:
            raise BadResponse(f"the stream has {so_far} tokens, allowed: max_new_tokens {self._most}")
        size = self._request.terms.vocab_size
        if size is not None and self.on_tokens is not None and (highest := max(ids, default=0)) >= size:
            raise BadResponse(f"output_ids has {highest}, allowed: 0 to below the vocabulary's size {size}")

    def _decode(self, payload: bytes) -> None:
        try:
            parsed = parse_answer(payload)
        except MALFORMED as error:
            raise undecodable(error, payload) from error
        before = self._parts
        if before is None or not before.output_ids:
            self._parts, so_far = parsed, len(parsed.output_ids)
        elif _repeats(before, parsed):
            self._repeats, self._newest, self._parts = True, payload, None
            so_far = len(parsed.output_ids)
        else:
            self._repeats = False
            before.append(parsed)
            so_far = len(before.output_ids) - 1  # the last token may come again, see _so_far
        self._check(parsed.output_ids, so_far)

    def _so_far(self) -> ParsedAnswer | None:
        """Return the answer that has come in parts, as far as it has."""
        parsed = self._parts
        claimed = parsed.meta.get("completion_tokens") if parsed is not None else None
        if parsed is not None and isinstance(claimed, int):
            parsed.cut(claimed)  # the abort of a queued request may send its last token again
        return parsed

    def turn(self, asked: Asked) -> Turn | None:
        """Return the Turn of a stream that has ended; None if it was cut off before its last event.

        Raises:
          ServerError, ServerBusy, RequestRejected: as for an answer that is not streamed.
        """
        if self._refusal is not None:
            raise _refusal_of(asked.attempted, self._refusal)
        try:
            answer: FastAnswer | ParsedAnswer | None = decode_answer(self._newest) if self._repeats else self._so_far()
        except MALFORMED as error:
            raise damaged(asked, error, self._newest) from error
        if answer is None or not self.done or answer.meta.get("finish_reason") is None:
            return None
        return turn_of(answer, asked)

    def cut_off(self, asked: Asked) -> Turn | None:
        """Return the tokens of a stream that was cut off as a Turn with stop ABORT; None if there are none."""
        try:
            parsed = parse_answer(self._newest) if self._repeats else self._so_far()
            if parsed is None or not parsed.output_ids:
                return None
            parsed.cut(min(len(parsed.output_ids), len(parsed.log_probs or ())))
            parsed.meta |= {"finish_reason": {"type": "abort", "message": "the stream was cut off"}}
            return turn_of(parsed, asked)
        except (ServerError, *MALFORMED):
            return None  # the tokens are not worth more than the error that cut the stream off


def _repeats(before: ParsedAnswer, parsed: ParsedAnswer) -> bool:
    """Return True if the later of two events repeats the tokens of the earlier one."""
    claimed = parsed.meta.get("completion_tokens")
    if isinstance(claimed, int):
        return len(parsed.output_ids) == claimed
    return parsed.output_ids[: len(before.output_ids)] == before.output_ids


def _refusal_of(attempted: str, payload: bytes) -> ServerError:
    """Return the exception for a refused stream, which has status 200 and the real status inside."""
    try:
        event: Any = msgspec.json.decode(payload)
        code = event["error"]["code"]
    except (*MALFORMED, TypeError, KeyError):
        code = None
    return error_of(attempted, code if isinstance(code, int) else _UNKNOWN_STATUS, words_of(payload))
