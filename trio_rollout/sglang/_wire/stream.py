"""A streamed /generate answer: decodes server-sent events into the Turn, or into the tokens that came before a break.

By default each of SGLang's events repeats the answer so far. A server that was started with
``--incremental-streaming-output`` sends only the new part in each event. The first two events with tokens show which of the two
it is. Of events that repeat the answer only the newest is kept and only the last is decoded: decoding each would be quadratic.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import msgspec

from ..._core.values import Turn
from ...errors import ServerError
from .answer import Asked, damaged, turn_of
from .decoding import FastAnswer, ParsedAnswer, decode_answer, parse_answer
from .errors import MALFORMED, error_of, words_of

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_UNKNOWN_STATUS: Final = 500


def ignore_progress() -> None:
    """Do nothing: the callback of a stream that is not watched."""


class _Ids(msgspec.Struct):
    """The part of an answer that says which tokens have come."""

    output_ids: list[int] = []


@final
class StreamDecoder:
    """Decodes one stream; ``on_progress`` is called for each event that brings tokens, ``on_tokens`` with all ids so far."""

    def __init__(
        self,
        on_progress: Callable[[], None] = ignore_progress,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.on_progress = on_progress
        self.on_tokens = on_tokens
        self.done = False
        self._lines = bytearray()
        self._newest = b""
        self._parts: ParsedAnswer | None = None
        self._repeats: bool | None = None
        self._failure: tuple[Exception, bytes] | None = None
        self._refusal: bytes | None = None

    @property
    def newest(self) -> bytes:
        """The newest event, not decoded yet, of a stream whose events repeat the answer; empty for any other stream."""
        return self._newest

    def feed(self, data: bytes) -> None:
        """Accept bytes of the stream, cut anywhere. Damage is reported at the end, by ``turn``."""
        self._lines += data
        if b"\n" not in data:
            return
        *lines, rest = self._lines.split(b"\n")
        self._lines = rest
        for line in lines:
            if line.startswith(_DATA):  # other lines are comments, names and blank ones
                self._event(bytes(line[len(_DATA) :].strip()))

    def _event(self, payload: bytes) -> None:
        if payload == _DONE:
            self.done = True
        elif payload.startswith(b'{"error"'):
            self._refusal = payload
        else:
            if self._repeats:
                self._newest = payload
            else:
                self._decode(payload)
            self.on_progress()
            if self.on_tokens is not None and (ids := self._ids_so_far()):
                self.on_tokens(ids)

    def _ids_so_far(self) -> Sequence[int]:
        if not self._repeats:
            return tuple(self._parts.output_ids) if self._parts is not None else ()
        try:
            return msgspec.json.decode(self._newest, type=_Ids).output_ids
        except MALFORMED:
            return ()  # the end of the stream says what is wrong

    def _decode(self, payload: bytes) -> None:
        try:
            parsed = parse_answer(payload)
        except MALFORMED as error:
            self._failure = self._failure or (error, payload)
            return
        before = self._parts
        if before is None or not before.output_ids:
            self._parts = parsed
        elif _repeats(before, parsed):
            self._repeats, self._newest, self._parts = True, payload, None
        else:
            self._repeats = False
            before.append(parsed)

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
        if self._failure is not None:
            raise damaged(asked, *self._failure)
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
