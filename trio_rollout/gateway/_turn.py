"""One turn of an agent: a request, and what is known of its answer so far.

A turn is shared by the tasks that need it. A handler asks for it and waits (``GatewaySession.turn_for``), a task of the
session samples it, and a second handler may join it when the client sends its request again. The turn is a child of the
session and not of a connection, so an answer outlives a broken connection and can be sent again.

A turn counts once its answer was delivered (docs/decisions/0013-a-turn-of-a-session-counts-when-it-is-delivered.md). An
agent that never got an answer did not act on it, so the session drops that answer when it closes, unless a later turn
continues it. A request is therefore recorded in two steps: ``node`` when it was sampled, ``delivered`` when its last byte
was handed to the connection.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import final

import attrs
import trio

from .._core.token_tree import Node
from .._util.condition import Condition
from ._streaming_text import StreamingText
from ._values import Answer, ChatRequest


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
