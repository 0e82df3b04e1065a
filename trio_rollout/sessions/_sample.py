"""Sampling one turn of a session: messages to ids, the context budget, the model, its parsers, the record."""

from collections import Counter
from typing import Final, final

import attrs
import numpy as np
import trio

from .._core.enums import Stop
from .._core.sampling import SamplingParams
from .._core.token_tree import Drift, Placement
from .._core.values import Turn
from .._threads import RunSync
from .._tokenizer import LARGE_TEXT
from ..abc import Rollout
from ..errors import ServerError, SettingsError
from ._conversation import Conversation, arguments_of
from ._parsers import Parsed, Parser
from ._refusal import Refusal
from ._reveal import Reveal
from ._settings import GatewaySettings
from ._turn import SessionTurn
from ._values import Answer, ChatRequest, Context, Finish, Message, ToolUse

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
