"""OpenAI's Chat Completions API: ``POST /v1/chat/completions``."""

from collections.abc import Sequence
from typing import Any, Final, final

import attrs
import msgspec

from ..tokenizer._messages import TEXT_PARTS, arguments_of, function_tool, join_text, tool_call
from ._protocol import (
    Refusal,
    at_least_one_message,
    decode_body,
    digest_of,
    event,
    json_schema_of,
    limit_of,
    refuse_unless_text,
    stops_of,
)
from ._values import Answer, ChatRequest, Message

_DONE: Final = b"data: [DONE]\n\n"
_ERROR_TYPES: Final = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}


class Part(msgspec.Struct):
    """A part of a message's content, in both of OpenAI's APIs."""

    type: str
    text: str = ""
    refusal: str = ""


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    def as_message(self, place: int) -> Message:
        """Return the message as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content, TEXT_PARTS, f"messages[{place}]")}
        if self.tool_calls:
            message["tool_calls"] = [
                tool_call(call.id, call.function.name, arguments_of(call.function.arguments))
                for call in self.tool_calls
            ]
        given = {name: getattr(self, name) for name in ("tool_call_id", "name", "reasoning_content")}
        return message | {name: value for name, value in given.items() if value is not None}


class _FunctionSpec(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _FunctionSpec | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None


@final
@attrs.frozen
class ChatCompletions:
    """The Chat Completions API as an ``AgentProtocol``."""

    def request(self, body: bytes) -> ChatRequest:
        asked: _Body = decode_body(body, _Body)
        at_least_one_message(asked.messages)
        if asked.n not in {None, 1}:
            raise Refusal(400, f"n: got {asked.n}, allowed: 1; send one request for each sample")
        if asked.logprobs:
            raise Refusal(400, "logprobs: log-probs are recorded for the trainer and not sent to agents")
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        tools = [] if asked.tool_choice == "none" else [tool.function for tool in asked.tools or () if tool.function]
        return ChatRequest(
            messages=tuple(message.as_message(place) for place, message in enumerate(asked.messages)),
            tools=tuple(function_tool(tool.name, tool.description, tool.parameters) for tool in tools),
            max_tokens=limit_of(most),
            stop=stops_of(asked.stop, "stop"),
            temperature=asked.temperature,
            top_p=asked.top_p,
            stream=bool(asked.stream),
            include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            model=asked.model,
            digest=digest_of("chat", body),
            extra=json_schema_of(asked.response_format, "response_format"),
        )

    def answer(self, answer: Answer, request: ChatRequest) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = _calls(answer)
        choice = {"index": 0, "message": message, "finish_reason": answer.finish.value, "logprobs": None}
        return {**_head(answer.id, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def stream(self, turn: str, request: ChatRequest) -> "_Stream":
        return _Stream(turn, request)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")  # noqa: PLR2004
        return {"error": {"message": refusal.message, "type": kind, "param": None, "code": None}}


def text_of(content: str | list[Part] | None, known: Sequence[str], where: str) -> str:
    """Return the text of a message's content; refuse parts that are none of the known types of text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        refuse_unless_text(part.type, known, where)
    return join_text(part.text or part.refusal for part in content)


@final
@attrs.frozen
class _Stream:
    turn: str
    request: ChatRequest

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def thoughts(self, delta: str) -> bytes:
        return self._chunk({"reasoning_content": delta})

    def text(self, delta: str) -> bytes:
        return self._chunk({"content": delta})

    def end(self, answer: Answer, rest: str, thoughts: str) -> bytes:
        parts = [self.thoughts(thoughts)] if thoughts else []
        if rest:
            parts.append(self.text(rest))
        parts += [self._chunk({"tool_calls": [{"index": at, **call}]}) for at, call in enumerate(_calls(answer))]
        parts.append(self._chunk({}, answer.finish.value))
        if self.request.include_usage:
            parts.append(self._event(choices=[], usage=_usage(answer)))
        return b"".join([*parts, _DONE])

    def fail(self, refusal: Refusal) -> bytes:
        return event(ChatCompletions().error(refusal)) + _DONE

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return self._event(choices=[choice])

    def _event(self, **fields: Any) -> bytes:
        return event({**_head(self.turn, self.request, "chat.completion.chunk"), **fields})


def _head(turn: str, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn}", "object": kind, "created": 0, "model": request.model}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [tool_call(call.id, call.name, call.arguments) for call in answer.calls]


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
