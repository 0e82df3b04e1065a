"""One turn of a session: asked for by a handler, sampled in the session's nursery, delivered by a handler.

Sampling one turn of a session: messages to ids, the context budget, the model, its parsers, the record.
"""

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final, final

import attrs
import numpy as np
import trio

from .._core.enums import Stop
from .._core.sampling import SamplingParams
from .._core.token_tree import Drift, Node, Placement
from .._core.values import Turn
from .._util.condition import Condition
from .._util.threads import RunSync
from ..abc import Rollout
from ..errors import ServerError, SettingsError
from ..tokenizer._tokenizer import LARGE_TEXT
from ._conversation import Conversation, arguments_of
from ._parsers import Parsed, Parser
from ._protocol import Refusal
from ._settings import GatewaySettings
from ._streaming_text import Reveal
from ._values import Answer, ChatRequest, Context, Finish, Message, ToolUse


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
    _changed: Condition = attrs.field(factory=Condition, init=False)

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


# The APIs' own limit. What is far above it is no number to a server that computes in float32.
_HOTTEST: Final = 2


@final
@attrs.define(eq=False, kw_only=True)
class Sampler:
    """How one session samples; ``context`` is the model's."""

    conversation: Conversation
    parser: Parser
    settings: GatewaySettings
    sampling: SamplingParams
    context: Context
    run_sync: RunSync
    drift: Counter[Drift] = attrs.field(factory=Counter, init=False)

    def reveal(self, request: ChatRequest) -> Reveal:
        """What shows an answer to this request while it is sampled."""
        stop = tuple(filter(None, (*self.sampling.stop, *request.stop)))
        marked_up = self.parser.takes_apart(request.tools)
        return Reveal(self.conversation.tokenizer, marked_up, stop, thinks=self.parser.finds_thoughts)

    async def place(self, request: ChatRequest) -> Placement:
        """The ids of the prompt; tokenised beside the loop if it is large.

        Raises:
          RequestRejected: the chat template refuses these messages.

        """
        if sum(len(message["content"]) for message in request.messages) > LARGE_TEXT:
            return await self.run_sync(self.conversation.place, request.messages, request.tools)
        return self.conversation.place(request.messages, request.tools)

    async def follow(self, turn: SessionTurn) -> None:
        """While a turn is streamed, ask the servers' parser what flows, whenever markup has gone by."""
        while (beginning := await turn.wait_for_question()) is not None:
            try:
                parsed = await self.parser.parse(beginning, ())
            except Exception:  # noqa: BLE001  the parser may be the user's; it is asked again at the end, where it counts
                return
            turn.learn(parsed.reasoning, parsed.text)

    async def sample(self, turn: SessionTurn, rollout: Rollout) -> tuple[Answer, Stop]:
        """Sample the turn and record it. Cancelled, nothing is recorded.

        Raises:
          RequestRejected: the chat template or the servers refuse it.
          Refusal: its temperature or top_p is out of range, and agents may choose them.
          ServerError: the servers failed, or their parsers did.

        """
        request = turn.request
        placement = await self.place(request)
        self.drift[placement.drift] += 1
        sampling = self._sampling(request, len(placement.prompt_ids))
        if not sampling.max_new_tokens:
            return Answer(
                id=turn.id, text="", finish=Finish.LENGTH, prompt_tokens=len(placement.prompt_ids)
            ), Stop.LENGTH
        watch = turn.on_tokens if request.stream else None
        sampled = await rollout.generate(placement.prompt_ids, sampling, on_tokens=watch)
        _check_shown(turn, sampled)
        parsed = await self._parsed(sampled.text, request)
        answer = _answer(turn.id, sampled, parsed, request)
        if len(sampled.output_ids):
            turn.node = self.conversation.record(request.messages, request.tools, message_of(answer), sampled)
        return answer, sampled.stop

    async def _parsed(self, text: str, request: ChatRequest) -> Parsed:
        await trio.lowlevel.checkpoint()
        if not self.parser.takes_apart(request.tools):
            return Parsed(text=text)
        return await self.parser.parse(text, request.tools)

    def _sampling(self, request: ChatRequest, prompt: int) -> SamplingParams:
        asked = request.max_tokens or self.settings.default_max_tokens or self.sampling.max_new_tokens
        chosen = attrs.evolve(
            self.sampling,
            max_new_tokens=self.context.room(prompt, asked),
            stop=(*self.sampling.stop, *request.stop),
            # A parser has to see the markup, which is special tokens to some models.
            skip_special_tokens=self.sampling.skip_special_tokens and not self.parser.takes_apart(request.tools),
            extra={**self.sampling.extra, **request.extra},
        )
        if not self.settings.agents_choose_temperature:
            return chosen
        if request.temperature is not None and request.temperature > _HOTTEST:
            raise Refusal(400, f"temperature: got {request.temperature}, allowed: 0 to {_HOTTEST}")
        try:
            return attrs.evolve(
                chosen,
                temperature=chosen.temperature if request.temperature is None else request.temperature,
                top_p=chosen.top_p if request.top_p is None else request.top_p,
            )
        except SettingsError as error:
            raise Refusal(400, str(error)) from error


def _check_shown(turn: SessionTurn, sampled: Turn) -> None:
    """What an agent was shown must be what is recorded; a request that began anew somewhere else may say other things."""
    shown = turn.sampled[: len(sampled.output_ids)]
    if len(shown) < len(turn.sampled) or not np.array_equal(np.asarray(shown), sampled.output_ids[: len(shown)]):
        raise ServerError(f"request {sampled.rid}: the answer is not the one that was being streamed")


def _answer(turn: str, sampled: Turn, parsed: Parsed, request: ChatRequest) -> Answer:
    calls = tuple(
        ToolUse(id=f"call_{turn}{place}", name=call.name or "", arguments=call.parameters or "{}")
        for place, call in enumerate(parsed.calls)
    )
    finish = Finish.LENGTH if sampled.stop is Stop.LENGTH else Finish.TOOL_CALLS if calls else Finish.STOP
    reason = sampled.meta_info.get("finish_reason")
    matched = reason.get("matched") if isinstance(reason, dict) else None
    return Answer(
        id=turn,
        text=parsed.text,
        finish=finish,
        reasoning=parsed.reasoning,
        calls=calls,
        stop_sequence=matched if matched in request.stop else None,
        prompt_tokens=len(sampled.prompt_ids),
        output_tokens=len(sampled.output_ids),
        cached_tokens=sampled.cached_tokens,
    )


def message_of(answer: Answer) -> Message:
    """The answer as the chat template takes it, when it stands in a conversation."""
    message: dict[str, object] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call.arguments)},
            }
            for call in answer.calls
        ]
    return message
