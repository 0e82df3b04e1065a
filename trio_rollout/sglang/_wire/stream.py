"""A streamed /generate answer: server-sent events in, the Turn at the end, or what there is of it.

SGLang sends the whole answer so far in each event, unless the server was started with ``--incremental-streaming-output``:
then parts. Which of the two it is shows in the first two events that have tokens. Of whole answers only the newest is kept,
and only the last is decoded: decoding each would be quadratic.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import msgspec

from ..._core.values import Turn
from ...errors import ServerError
from .answer import Asked, damaged, turn_of
from .decoding import Draft, Whole, decode_draft, decode_whole
from .errors import MALFORMED, error_of, words_of

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_UNKNOWN_STATUS: Final = 500


def nothing_moved() -> None:
    """For streams that nobody watches any more."""


class _Ids(msgspec.Struct):
    """All that is needed of an answer to tell which tokens have come."""

    output_ids: list[int] = []


@final
class StreamDecoder:
    """Decodes one stream; ``moved`` is called for each event that brings tokens, ``on_tokens`` with all ids so far."""

    def __init__(
        self, moved: Callable[[], None] = nothing_moved, on_tokens: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        self.moved = moved
        self.on_tokens = on_tokens
        self.done = False
        self._lines = bytearray()
        self._newest = b""
        self._parts: Draft | None = None
        self._whole: bool | None = None
        self._failure: tuple[Exception, bytes] | None = None
        self._refusal: bytes | None = None

    @property
    def newest(self) -> bytes:
        """The newest whole answer, not decoded yet; empty for a stream that comes in parts, which are."""
        return self._newest

    def feed(self, data: bytes) -> None:
        """Take in bytes of the stream, cut anywhere. Damage is kept for the end."""
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
            if self._whole:
                self._newest = payload
            else:
                self._decode(payload)
            self.moved()
            if self.on_tokens is not None and (ids := self._ids_so_far()):
                self.on_tokens(ids)

    def _ids_so_far(self) -> Sequence[int]:
        if not self._whole:
            return tuple(self._parts.output_ids) if self._parts is not None else ()
        try:
            return msgspec.json.decode(self._newest, type=_Ids).output_ids
        except MALFORMED:
            return ()  # the end of the stream says what is wrong

    def _decode(self, payload: bytes) -> None:
        try:
            draft = decode_draft(payload)
        except MALFORMED as error:
            self._failure = self._failure or (error, payload)
            return
        before = self._parts
        if before is None or not before.output_ids:
            self._parts = draft
        elif _is_whole(before, draft):
            self._whole, self._newest, self._parts = True, payload, None
        else:
            self._whole = False
            before.append(draft)

    def _so_far(self) -> Draft | None:
        """What has come in parts."""
        draft = self._parts
        claimed = draft.meta.get("completion_tokens") if draft is not None else None
        if draft is not None and isinstance(claimed, int):
            draft.cut(claimed)  # the abort of a queued request may send its last token again
        return draft

    def turn(self, asked: Asked) -> Turn | None:
        """The Turn of a stream that has ended; None if it was cut off before its own end.

        Raises:
          ServerError, ServerBusy, RequestRejected: as for an answer that is not streamed.

        """
        if self._refusal is not None:
            raise _refusal_of(asked.attempted, self._refusal)
        if self._failure is not None:
            raise damaged(asked, *self._failure)
        try:
            answer: Whole | Draft | None = decode_whole(self._newest) if self._whole else self._so_far()
        except MALFORMED as error:
            raise damaged(asked, error, self._newest) from error
        if answer is None or not self.done or answer.meta.get("finish_reason") is None:
            return None
        return turn_of(answer, asked)

    def cut_off(self, asked: Asked) -> Turn | None:
        """What a stream that was cut off had brought, as a Turn with stop ABORT; None if that is no token."""
        try:
            draft = decode_draft(self._newest) if self._whole else self._so_far()
            if draft is None or not draft.output_ids:
                return None
            draft.cut(min(len(draft.output_ids), len(draft.log_probs or ())))
            draft.meta |= {"finish_reason": {"type": "abort", "message": "the stream was cut off"}}
            return turn_of(draft, asked)
        except (ServerError, *MALFORMED):
            return None  # the tokens are not worth more than the error that cut the stream off


def _is_whole(before: Draft, draft: Draft) -> bool:
    """Whether the later of two events repeats the tokens of the earlier one."""
    claimed = draft.meta.get("completion_tokens")
    if isinstance(claimed, int):
        return len(draft.output_ids) == claimed
    return draft.output_ids[: len(before.output_ids)] == before.output_ids


def _refusal_of(attempted: str, payload: bytes) -> ServerError:
    """A refused stream has status 200, and the real status inside."""
    try:
        event: Any = msgspec.json.decode(payload)
        code = event["error"]["code"]
    except (*MALFORMED, TypeError, KeyError):
        code = None
    return error_of(attempted, code if isinstance(code, int) else _UNKNOWN_STATUS, words_of(payload))
