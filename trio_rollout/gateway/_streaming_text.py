"""The part of an answer that may be shown while the answer is still being sampled.

Text is shown as long as it can't turn out to be anything else. It stops for good at the first markup token (a tool call);
half a character, or what could begin a stop sequence, is held back. Thoughts are shown too. Only the servers' parser knows
whether the text after a piece of markup is thoughts or the answer: ``unclassified`` is the text to ask it about, and
``classify`` takes its reply. There is no parser here. The text that was held back is sent at the end, when the parser has
had the complete answer.
"""

import enum
from collections.abc import Sequence
from typing import Final, final

import attrs

from ..tokenizer import Tokenizer

_HALF: Final = "�"


class Flow(enum.Enum):
    """The kind of text that is being sampled."""

    UNKNOWN = "unknown"
    """Not classified yet: the text is held back."""
    THOUGHTS = "thoughts"
    """Thoughts, until the next markup."""
    TEXT = "text"
    """The answer itself, until the next markup."""
    HELD = "held"
    """Anything else: it is sent when the answer is complete."""


@final
@attrs.define(eq=False)
class StreamingText:
    """The text and the thoughts of one answer that may be shown so far.

    ``parses_markup`` is true if the complete answer goes through a parser, ``finds_thoughts`` if the parser looks for
    thoughts. Any text may be thoughts then, also at the very beginning: some models begin in the middle of them.
    """

    tokenizer: Tokenizer
    parses_markup: bool
    stop: tuple[str, ...] = ()
    finds_thoughts: bool = False
    text: str = attrs.field(default="", init=False)
    """The answer, as far as it may be shown."""
    thoughts: str = attrs.field(default="", init=False)
    """The thoughts before the answer, as far as they may be shown."""
    unclassified: str | None = attrs.field(default=None, init=False)
    """A beginning of the answer, with its markup: the parser has to say if it ends in thoughts or in text."""
    _flow: Flow = attrs.field(init=False)
    _ids: Sequence[int] = attrs.field(default=(), init=False)
    _run: str = attrs.field(default="", init=False)
    """The text since the last markup, when ``unclassified`` was set."""
    _earlier: str = attrs.field(default="", init=False)
    """The thoughts before the last markup."""
    _decoded: str = attrs.field(default="", init=False)
    """The text since the last markup."""
    _before: int = attrs.field(default=0, init=False)
    """The ids from here on are decoded together, for the context of the newest."""
    _read: int = attrs.field(default=0, init=False)
    """The number of ids that are in ``_decoded`` or before it."""

    def __attrs_post_init__(self) -> None:
        self._flow = Flow.UNKNOWN if self.finds_thoughts else Flow.TEXT

    @property
    def size(self) -> int:
        """The number of characters that may be shown."""
        return len(self.thoughts) + len(self.text)

    def feed(self, ids: Sequence[int]) -> None:
        """Take in all ids that were sampled so far."""
        self._ids = ids
        while self._flow is not Flow.HELD and self._read < len(ids):
            end = next((place for place in range(self._read, len(ids)) if self._ends_at(ids[place])), len(ids))
            self._decode(ids[:end])
            if self._flow is Flow.UNKNOWN and self._decoded.strip():
                if self.unclassified is None:
                    self.unclassified, self._run = self.tokenizer.decode(ids[: self._read]), self._decoded.strip()
                return
            self._show()
            if end == len(ids):
                return
            self._pass_markup(end)

    def classify(self, thoughts: str, text: str) -> None:
        """Take in the parser's reply about ``unclassified``."""
        self.unclassified = None
        seen = text.strip() == self._run if text.strip() else thoughts.rstrip().endswith(self._run)
        if not (seen and thoughts.startswith(self.thoughts)):
            self._flow = Flow.HELD  # the parser has other words for it than the tokenizer
            return
        self._flow = Flow.TEXT if text.strip() else Flow.THOUGHTS
        if self._flow is Flow.TEXT:
            self.thoughts = thoughts
        else:
            self._earlier = thoughts[: thoughts.rindex(self._run)]
        self._show()
        self.feed(self._ids)

    def _pass_markup(self, end: int) -> None:
        """Go on after a markup token, if the text after it may still be shown."""
        thinking = self.finds_thoughts and self._flow in {Flow.UNKNOWN, Flow.THOUGHTS}
        over = self._ids[end] == self.tokenizer.eos_token_id
        self._flow = Flow.UNKNOWN if thinking and not over else Flow.HELD
        self._before = self._read = end + 1
        self._decoded = ""

    def _ends_at(self, token: int) -> bool:
        return token == self.tokenizer.eos_token_id or (self.parses_markup and token in self.tokenizer.added_tokens)

    def _decode(self, ids: Sequence[int]) -> None:
        """Decode the newest ids together with those before them: some tokens have their text only in context."""
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
        shown = self._decoded.lstrip() if self.finds_thoughts else self._decoded
        for stop in self.stop:
            shown = shown.split(stop, 1)[0]
        held = max((_overlap(shown, stop) for stop in self.stop), default=0)
        shown = shown[: len(shown) - held]
        self.text = shown.rstrip() if self.parses_markup else shown


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
