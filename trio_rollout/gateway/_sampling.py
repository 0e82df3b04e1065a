"""Sampling one turn of a session: messages to ids, the token budget, the model, its parsers, the record."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, final

import attrs
import msgspec
import numpy as np
import trio

from .._core.enums import Stop
from .._core.sampling import SamplingParams
from .._core.token_tree import Drift
from .._core.values import Turn
from .._util.threads import RunSync
from .._util.user_code import ends_the_process
from ..abc import Rollout
from ..errors import ServerError, SettingsError
from ..tokenizer._messages import NO_OBJECT, arguments_of, tool_call
from ..tokenizer._tokenizer import LARGE_TEXT
from ._conversation import Conversation, Placed
from ._parsers import Call, Parsed, Parser
from ._protocol import Refusal
from ._settings import GatewaySettings
from ._tools import custom_arguments
from ._turn import AgentTurn, StreamingText
from ._values import Answer, ChatRequest, ContextLimits, Finish, Message, Tool, ToolUse

# The APIs' own limit. A server that computes in float32 takes a much larger number for infinity.
_HIGHEST_TEMPERATURE: Final = 2
_FORMS: Final = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})
_OVERHEAD: Final = 16  # characters that a message without a text counts: a template runs through its body for each


@final
@attrs.define(eq=False, kw_only=True)
class Sampler:
    """Samples the turns of one session. ``limits`` are the model's."""

    conversation: Conversation
    parser: Parser
    settings: GatewaySettings
    sampling: SamplingParams
    limits: ContextLimits
    run_sync: RunSync
    drift: Counter[Drift] = attrs.field(factory=Counter, init=False)

    async def sample(self, turn: AgentTurn, rollout: Rollout) -> tuple[Answer, Stop]:
        """Sample the turn and record its answer. Cancelled, nothing is recorded.

        Raises:
          RequestRejected: the chat template or the servers refuse the request.
          Refusal: the temperature or top_p is out of range, where agents may choose them.
          ServerError: the servers or their parsers failed.
        """
        request = turn.request
        placement = await self.place(request)
        self.drift[placement.drift] += 1
        sampling = self._sampling(request, len(placement.prompt_ids))
        if not sampling.max_new_tokens:
            empty = Answer(id=turn.id, text="", finish=Finish.LENGTH, prompt_tokens=len(placement.prompt_ids))
            return empty, Stop.LENGTH
        on_tokens = turn.on_tokens if request.stream else None
        thinks = self._thinks_before(request, sampling)
        extra: dict[str, object] = {"require_reasoning": True} if thinks else {}
        if images := [image for message in request.messages for image in message.get("images", ())]:
            extra["image_data"] = images
        sampled = await rollout.generate(placement.prompt_ids, sampling, extra=extra, on_tokens=on_tokens)
        _require_streamed(turn, sampled)
        parsed = turn.streaming.continued(await self._parsed(sampled.text, request.tools))
        answer = _answer(turn.id, sampled, parsed, request)
        if len(sampled.output_ids):
            turn.node = self.conversation.record(
                request.messages,
                request.tools,
                message_of(answer),
                sampled,
                variables=self._variables(request),
                placed=placement,
            )
        return answer, sampled.stop

    async def place(self, request: ChatRequest) -> Placed:
        """Return the ids of the prompt. A large prompt is tokenised in a thread.

        Raises:
          RequestRejected: the chat template refuses these messages.
        """
        given = request.messages, request.tools, self._variables(request)
        if sum(_OVERHEAD + len(message["content"]) for message in request.messages) > LARGE_TEXT:
            return await self.run_sync(self.conversation.place, *given)
        return self.conversation.place(*given)

    def _variables(self, request: ChatRequest) -> Mapping[str, object]:
        return {**self.settings.template_variables, **request.variables}

    @property
    def image(self) -> str | None:
        """The chat template's text in the place of an image; None if the policy sees none."""
        return self.conversation.tokenizer.image_markup if self.limits.sees else None

    def streaming_text(self, request: ChatRequest) -> StreamingText:
        """Return the text to stream for an answer to this request, still empty."""
        return StreamingText(
            self.conversation.tokenizer,
            parses_markup=self.parser.parses_markup(request.tools),
            stop=tuple(filter(None, (*self.sampling.stop, *request.stop))),
            finds_thoughts=self.parser.finds_thoughts,
        )

    async def classify_stream(self, turn: AgentTurn) -> None:
        """While a turn is streamed, ask the servers' parser about each part of it: thoughts or text?"""
        while (beginning := await turn.wait_unclassified()) is not None:
            try:
                parsed = await self.parser.parse(beginning, ())
            except BaseException as error:  # noqa: ASYNC103  the parser may be the user's
                if ends_the_process(error):
                    raise
                return  # noqa: ASYNC104  the parser is asked again at the end, where it counts
            turn.classify(parsed.reasoning.strip(), parsed.text)

    async def _parsed(self, text: str, tools: Sequence[Tool]) -> Parsed:
        await trio.lowlevel.checkpoint()
        if not self.parser.parses_markup(tools):
            return Parsed(text=text)
        parsed = await self.parser.parse(text, tools)
        if not self.parser.finds_thoughts:
            return parsed
        # As in a stream: space around thoughts is the template's.
        return attrs.evolve(parsed, text=parsed.text.lstrip(), reasoning=parsed.reasoning.strip())

    def _thinks_before(self, request: ChatRequest, sampling: SamplingParams) -> bool:
        """Return True if the answer has a form that begins behind its thoughts.

        Without a word about thoughts, SGLang holds the first token to the form, and what the parser then takes for thoughts
        is the answer.
        """
        if not (self.parser.finds_thoughts and _FORMS.intersection(sampling.extra)):
            return False
        variables = {**self.conversation.tokenizer.variables, **self._variables(request)}
        return not any(variables.get(name) is False for name in ("enable_thinking", "thinking"))

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        wanted = request.max_tokens or self.settings.default_max_tokens or self.sampling.max_new_tokens
        changes: dict[str, object] = {
            "max_new_tokens": self.limits.room(prompt_tokens, wanted),
            "stop": (*self.sampling.stop, *request.stop),
            # A parser has to see the markup, which some models write in special tokens.
            "skip_special_tokens": self.sampling.skip_special_tokens and not self.parser.parses_markup(request.tools),
            "extra": {**self.sampling.extra, **request.extra},
        }
        if self.settings.agents_choose_temperature:
            if request.temperature is not None and request.temperature > _HIGHEST_TEMPERATURE:
                raise Refusal(400, f"temperature: got {request.temperature}, allowed: 0 to {_HIGHEST_TEMPERATURE}")
            chosen = {"temperature": request.temperature, "top_p": request.top_p}
            changes |= {name: value for name, value in chosen.items() if value is not None}
        try:
            return attrs.evolve(self.sampling, **changes)
        except SettingsError as error:
            raise Refusal(400, str(error)) from error


def _require_streamed(turn: AgentTurn, sampled: Turn) -> None:
    """Refuse an answer that differs from the tokens the agent was shown, as after a new try on another server."""
    shown = turn.sampled[: len(sampled.output_ids)]
    if len(shown) < len(turn.sampled) or not np.array_equal(np.asarray(shown), sampled.output_ids[: len(shown)]):
        raise ServerError(f"request {sampled.rid}: the final answer differs from the tokens that were streamed")


def _answer(turn: str, sampled: Turn, parsed: Parsed, request: ChatRequest) -> Answer:
    calls = tuple(
        ToolUse(id=f"call_{turn}{place}", name=call.name or "", arguments=_arguments(call, request))
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


def _arguments(call: Call, request: ChatRequest) -> str:
    """Return a call's arguments as the JSON text of an object: the parser's text if that is one."""
    written = call.parameters
    form = request.forms.get(call.name or "")
    if form is not None and form.custom:
        return custom_arguments(written)
    value = arguments_of(written)
    kept = written.lstrip().startswith("{") and value != {NO_OBJECT: written}
    return written if kept else msgspec.json.encode(value).decode()


def message_of(answer: Answer) -> Message:
    """Return the answer as a message of a conversation, as chat templates take it."""
    message: dict[str, object] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [tool_call(call.id, call.name, arguments_of(call.arguments)) for call in answer.calls]
    return message
