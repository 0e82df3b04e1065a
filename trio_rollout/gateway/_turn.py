"""One turn of an agent: a request, and what is known of its answer so far.

A turn is shared by the tasks that need it. A handler asks for it and waits (``GatewaySession.turn_for``), a task of the
session samples it, and a second handler may join it when the client sends its request again. The turn is a child of the
session and not of a connection, so an answer outlives a broken connection and can be sent again.

A turn counts once its answer was delivered (docs/decisions/0013-a-turn-of-a-session-counts-when-it-is-delivered.md). An
agent that never got an answer did not act on it, so the session drops that answer when it closes, unless a later turn
continues it. A request is therefore recorded in two steps: ``node`` when it was sampled, ``delivered`` when its last byte
was handed to the connection.

``StreamingText`` is the part of an answer that may be shown while the answer is still being sampled. Text is shown as long
as it can't turn out to be anything else. It stops for good at the first markup token (a tool call); half a character, or
what could begin a stop sequence, is held back. Thoughts are shown too. Only the servers' parser knows whether the text after
a piece of markup is thoughts or the answer: ``unclassified`` is the text to ask it about, and ``classify`` takes its reply.
There is no parser here. The text that was held back is sent at the end, when the parser has had the complete answer.
"""

import enum
import hashlib
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final, final

import attrs
import trio

from .._core.token_tree import Node
from .._util.condition import Condition
from ..tokenizer import Tokenizer
from ._conversation import digest_of_last
from ._parsers import Parsed
from ._values import Answer, ChatRequest

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

    def continued(self, parsed: Parsed) -> Parsed:
        """Return the parsed answer; what was shown stands in place of a text that does not begin with it."""
        text = parsed.text if parsed.text.startswith(self.text) else self.text
        reasoning = parsed.reasoning if parsed.reasoning.startswith(self.thoughts) else self.thoughts
        return attrs.evolve(parsed, text=text, reasoning=reasoning)

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


@final
@attrs.define(eq=False, kw_only=True)
class AgentTurn:
    """One turn of a session. At its end it has an ``answer`` or an ``error``.

    Its ``scope`` is cancelled when the last client that waits for it has gone, or when the session closes. The messages
    of its ``request`` are dropped at its end (docs/decisions/0023-what-a-session-keeps.md).
    """

    id: str
    request: ChatRequest
    streaming: StreamingText
    """The part of the answer that may be shown so far."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    answer: Answer | None = attrs.field(default=None, init=False)
    error: BaseException | None = attrs.field(default=None, init=False)
    node: Node | None = attrs.field(default=None, init=False)
    """The recorded answer; None if it has no token."""
    delivered: bool = attrs.field(default=False, init=False)
    """True once a client got the answer."""
    sampled: Sequence[int] = attrs.field(default=(), init=False)
    """The ids that were streamed so far."""
    _clients: int = attrs.field(default=0, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)

    @property
    def is_over(self) -> bool:
        """True if there is an answer or an error."""
        return self.answer is not None or self.error is not None

    @property
    def is_undelivered(self) -> bool:
        """True if there is an answer that no client got and no client waits for."""
        return self.answer is not None and not self.delivered and not self._clients

    @contextmanager
    def joined(self) -> Generator["AgentTurn"]:
        """Count a client that waits for the turn; cancel the turn when the last one leaves without an answer."""
        self._clients += 1
        try:
            yield self
        finally:
            self._clients -= 1
            if not self._clients and not self.is_over:
                self.scope.cancel(reason="the client has gone")
            self._changed.notify()

    def on_tokens(self, ids: Sequence[int]) -> None:
        """Take in the ids that were sampled so far."""
        self.sampled = ids
        self.streaming.feed(ids)
        self._changed.notify()

    def classify(self, thoughts: str, text: str) -> None:
        """Take in the parser's answer about a beginning of the answer: see ``StreamingText.classify``."""
        self.streaming.classify(thoughts, text)
        self._changed.notify()

    def end(self, answer: Answer | None, error: BaseException | None) -> None:
        """Set the answer or the error; the first call counts."""
        if not self.is_over:
            self.answer, self.error = answer, error
            self.request = attrs.evolve(self.request, messages=(), tools=())
            self._changed.notify()

    async def wait_unclassified(self) -> str | None:
        """Wait until the parser has to classify a beginning of the answer, and return it; None at the turn's end."""
        await self._changed.wait_until(lambda: self.is_over or self.streaming.unclassified is not None)
        return None if self.is_over else self.streaming.unclassified

    async def wait_for_more(self, shown: int) -> None:
        """Wait until more than ``shown`` characters may be shown, or for the turn's end."""
        await self._changed.wait_until(lambda: self.is_over or self.streaming.size > shown)

    async def wait_over(self) -> None:
        """Wait for the answer or the error."""
        await self._changed.wait_until(lambda: self.is_over)

    async def wait_left(self) -> None:
        """Wait until no client waits for the turn any more."""
        await self._changed.wait_until(lambda: not self._clients)


@final
@attrs.define(eq=False)
class TurnIds:
    """Gives the turns of one session their ids, which become the ids of answers and of tool calls.

    They follow from the sample and the requests, and are the same when an agent begins anew and asks for the same: some
    chat templates write the ids of tool calls, and with other ids the next prompt would be another one.
    """

    sample: str
    _asked: Counter[bytes] = attrs.field(factory=Counter, init=False)
    """The number of times that each request was made."""

    def next(self, request: ChatRequest) -> str:
        """Return the id of the turn that answers this request; it is given once."""
        asked = digest_of_last(request.messages)
        self._asked[asked] += 1
        text = f"{self.sample}|{self._asked[asked]}|"
        return hashlib.blake2b(text.encode() + asked, digest_size=16).hexdigest()
