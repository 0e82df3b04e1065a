"""What of an answer may be shown while it is still being sampled.

Text flows as long as it can't turn out to be something else: it stops for good at the first token that is markup (a tool
call), and what could be the beginning of a stop sequence, or half a character, is held back. Thoughts flow too: whether the
text behind a piece of markup is thoughts or the answer is asked of the servers' parser (``question``, ``learn``). There is no
parser here: whatever was held back is sent when the model's own parser has had the whole answer.
"""

import enum
from collections.abc import Sequence
from typing import Final, final

import attrs

from ..tokenizer._tokenizer import Tokenizer

_HALF: Final = "�"


class Flow(enum.Enum):
    """What the text that is being sampled is."""

    UNKNOWN = "unknown"
    """Nobody has said so far: it is held back."""
    THOUGHTS = "thoughts"
    """Thoughts, until the next markup."""
    TEXT = "text"
    """The answer itself, until the next markup."""
    HELD = "held"
    """Anything else: it comes when the answer is complete."""


@final
@attrs.define(eq=False)
class Reveal:
    """What may be shown of one answer. ``marked_up``: whether its text goes through a parser when it is complete.

    ``thinks``: any of its text may be thoughts, also at the very beginning, since some models begin in the middle of them.
    """

    tokenizer: Tokenizer
    marked_up: bool
    stop: tuple[str, ...] = ()
    thinks: bool = False
    text: str = attrs.field(default="", init=False)
    """The answer, as far as it may be shown."""
    thoughts: str = attrs.field(default="", init=False)
    """The thoughts before it, as far as they may be shown."""
    question: str | None = attrs.field(default=None, init=False)
    """A beginning of the answer, markup and all: its parser has to say what the end of it is."""
    _flow: Flow = attrs.field(init=False)
    _ids: Sequence[int] = attrs.field(default=(), init=False)
    _run: str = attrs.field(default="", init=False)
    _earlier: str = attrs.field(default="", init=False)
    _decoded: str = attrs.field(default="", init=False)
    _before: int = attrs.field(default=0, init=False)
    _read: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._flow = Flow.UNKNOWN if self.thinks else Flow.TEXT

    @property
    def size(self) -> int:
        """How many characters may be shown."""
        return len(self.thoughts) + len(self.text)

    def feed(self, ids: Sequence[int]) -> None:
        """These are all ids so far."""
        self._ids = ids
        while self._flow is not Flow.HELD and self._read < len(ids):
            end = next((place for place in range(self._read, len(ids)) if self._ends_at(ids[place])), len(ids))
            self._decode(ids[:end])
            if self._flow is Flow.UNKNOWN and self._decoded.strip():
                if self.question is None:
                    self.question, self._run = self.tokenizer.decode(ids[: self._read]), self._decoded.strip()
                return
            self._show()
            if end == len(ids):
                return
            self._pass_markup(end)

    def learn(self, thoughts: str, text: str) -> None:
        """The parser's answer to ``question``."""
        self.question = None
        seen = text.strip() == self._run if text.strip() else thoughts.rstrip().endswith(self._run)
        if not (seen and thoughts.startswith(self.thoughts)):
            self._flow = Flow.HELD  # it says something else than we have seen
            return
        self._flow = Flow.TEXT if text.strip() else Flow.THOUGHTS
        if self._flow is Flow.TEXT:
            self.thoughts = thoughts
        else:
            self._earlier = thoughts[: thoughts.rindex(self._run)]
        self._show()
        self.feed(self._ids)

    def _pass_markup(self, end: int) -> None:
        """Go on behind a token that is markup, if what stands there may still be shown."""
        thinking = self.thinks and self._flow in {Flow.UNKNOWN, Flow.THOUGHTS}
        over = self._ids[end] == self.tokenizer.eos_token_id
        self._flow = Flow.UNKNOWN if thinking and not over else Flow.HELD
        self._before = self._read = end + 1
        self._decoded = ""

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
        if self._flow is Flow.THOUGHTS:
            self.thoughts = self._earlier + self._decoded.strip()
        if self._flow is not Flow.TEXT:
            return
        shown = self._decoded.lstrip() if self.thinks else self._decoded
        for stop in self.stop:
            shown = shown.split(stop, 1)[0]
        held = max((_overlap(shown, stop) for stop in self.stop), default=0)
        shown = shown[: len(shown) - held]
        self.text = shown.rstrip() if self.marked_up else shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
