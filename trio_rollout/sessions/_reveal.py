"""What of an answer may be shown while it is still being sampled.

Text flows as long as it can't turn out to be something else: it stops for good at the first token that is markup (a tool
call, a thought), and what could be the beginning of a stop sequence, or half a character, is held back. There is no parser
here: whatever was held back is sent when the model's own parser has had the whole answer.
"""

from collections.abc import Sequence
from typing import Final, final

import attrs

from .._tokenizer import Tokenizer

_HALF: Final = "�"


@final
@attrs.define(eq=False)
class Reveal:
    """The visible text of one answer. ``marked_up``: whether its text goes through a parser when it is complete.

    ``held``: all of it may be thoughts, some models begin in the middle of them; so nothing is shown before its end.
    """

    tokenizer: Tokenizer
    marked_up: bool
    stop: tuple[str, ...] = ()
    held: bool = False
    text: str = ""
    """What may be shown."""
    _decoded: str = attrs.field(default="", init=False)
    _before: int = attrs.field(default=0, init=False)
    _read: int = attrs.field(default=0, init=False)
    _ended: bool = attrs.field(default=False, init=False)

    def feed(self, ids: Sequence[int]) -> None:
        """These are all ids so far."""
        if self.held or self._ended or len(ids) <= self._read:
            return
        upto = next((place for place in range(self._read, len(ids)) if self._ends_at(ids[place])), len(ids))
        self._ended = upto < len(ids)
        self._decode(ids[:upto])
        self._show()

    def _ends_at(self, token: int) -> bool:
        return token == self.tokenizer.eos_token_id or (self.marked_up and token in self.tokenizer.added_tokens)

    def _decode(self, ids: Sequence[int]) -> None:
        """Decode the newest ids together with those before them: some tokens only have their text in context."""
        old = self.tokenizer.decode(ids[self._before : self._read], skip_special_tokens=True)
        new = self.tokenizer.decode(ids[self._before :], skip_special_tokens=True)
        if new.endswith(_HALF) or len(new) < len(old):
            return
        self._decoded += new[len(old) :]
        self._before, self._read = self._read, len(ids)

    def _show(self) -> None:
        shown = self._decoded
        for stop in self.stop:
            shown = shown.split(stop, 1)[0]
        held = max((_overlap(shown, stop) for stop in self.stop), default=0)
        shown = shown[: len(shown) - held]
        self.text = shown.rstrip() if self.marked_up else shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
