"""One turn of a session: asked for by a handler, sampled in the session's nursery, delivered by a handler."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import final

import attrs
import trio

from .._core.token_tree import Node
from .._signal import StateChange
from ._reveal import Reveal
from ._values import Answer, ChatRequest


@final
@attrs.define(eq=False, kw_only=True)
class SessionTurn:
    """Its scope is cancelled when everybody who wanted it has gone, or when its session closes.

    ``answer`` or ``error`` is set at its end. It counts only if it was ``delivered``. ``node`` is what was recorded of it. Its
    request is that of one turn only, and gone at its end: all of a session's requests together are much more than their
    conversation.
    """

    id: str
    request: ChatRequest
    reveal: Reveal
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    answer: Answer | None = attrs.field(default=None, init=False)
    error: Exception | None = attrs.field(default=None, init=False)
    node: Node | None = attrs.field(default=None, init=False)
    delivered: bool = attrs.field(default=False, init=False)
    sampled: Sequence[int] = attrs.field(default=(), init=False)
    _waiting: int = attrs.field(default=0, init=False)
    _changed: StateChange = attrs.field(factory=StateChange, init=False)

    @property
    def is_over(self) -> bool:
        """Whether there is an answer or an error."""
        return self.answer is not None or self.error is not None

    @property
    def is_undelivered(self) -> bool:
        """Whether it has an answer that nobody got and nobody is about to get."""
        return self.answer is not None and not self.delivered and not self._waiting

    @contextmanager
    def wanted(self) -> Generator["SessionTurn"]:
        """Somebody waits for it; when the last one leaves without an answer it is cancelled."""
        self._waiting += 1
        try:
            yield self
        finally:
            self._waiting -= 1
            if not self._waiting and not self.is_over:
                self.scope.cancel(reason="the client has gone")
            self._changed.notify()

    def on_tokens(self, ids: Sequence[int]) -> None:
        """More was sampled."""
        self.sampled = ids
        self.reveal.feed(ids)
        self._changed.notify()

    def end(self, answer: Answer | None, error: Exception | None) -> None:
        """Set how it ended; the first end counts."""
        if not self.is_over:
            self.answer, self.error = answer, error
            self.request = attrs.evolve(self.request, messages=(), tools=())
            self._changed.notify()

    def learn(self, thoughts: str, text: str) -> None:
        """The parser has said what flows."""
        self.reveal.learn(thoughts, text)
        self._changed.notify()

    async def wait_for_question(self) -> str | None:
        """Wait until the parser has to be asked about a beginning of the answer; None at the end."""
        await self._changed.wait_until(lambda: self.is_over or self.reveal.question is not None)
        return None if self.is_over else self.reveal.question

    async def wait_for_more(self, shown: int) -> None:
        """Wait until more than ``shown`` characters can be shown, or the end."""
        await self._changed.wait_until(lambda: self.is_over or self.reveal.size > shown)

    async def wait_over(self) -> None:
        """Wait for its answer or error."""
        await self._changed.wait_until(lambda: self.is_over)

    async def wait_left(self) -> None:
        """Wait until nobody waits for it any more."""
        await self._changed.wait_until(lambda: not self._waiting)
