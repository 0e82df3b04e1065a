"""OpenAI's Chat Completions API: ``POST /v1/chat/completions``."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import attrs
import msgspec

from ..tokenizer._messages import arguments_of, function_tool, join_text, tool_call
from ._fields import CHAT, CHAT_PARTS, CHAT_TOOLS, Kinds, Reading, decode_request, text_of_part, use_of
from ._protocol import (
    Answered,
    Refusal,
    at_least_one_message,
    checked_variables,
    digest_of,
    event,
    json_schema_of,
    limit_of,
    no_answer,
    stops_of,
    thinking_of,
)
from ._tools import INPUT, custom_tool, forms_of, text_input
from ._values import Answer, ChatRequest, Message, Tool, ToolForm, ToolUse

_DONE: Final = b"data: [DONE]\n\n"
_ERROR_TYPES: Final = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}


class ImageUrl(msgspec.Struct):
    """An image of Chat Completions."""

    url: str = ""


class Part(msgspec.Struct):
    """A part of a message's content, in both of OpenAI's APIs."""

    type: str
    text: str = ""
    refusal: str = ""
    image_url: "str | ImageUrl | None" = None


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _CustomCall(msgspec.Struct):
    name: str
    input: str = ""


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    custom: _CustomCall | None = None
    id: str = ""

    def as_call(self, where: str) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        if self.custom is not None:
            return tool_call(self.id, self.custom.name, {INPUT: self.custom.input})
        if self.function is None:
            raise Refusal(400, f"{where}: a tool call needs 'function' or 'custom'")
        return tool_call(self.id, self.function.name, arguments_of(self.function.arguments))


class _Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None

    def as_message(self, where: str, *, task: bool, image: str | None) -> Message:
        """Return the message as chat templates take it."""
        if self.role == "function" or self.function_call is not None:
            raise Refusal(400, f"{where}: this is the former form of a call; give 'tool_calls' and the role 'tool'")
        role = "system" if self.role == "developer" else self.role
        how = Reading(task=task and role != "tool", markup=image)
        text = text_of(self.content, CHAT_PARTS, where, how)
        message: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.as_call(where) for call in self.tool_calls]
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if how.images:
            message["images"] = how.images
        given = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": thoughts}
        return message | {name: value for name, value in given.items() if value is not None}


class _FunctionSpec(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _CustomSpec(msgspec.Struct):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _FunctionSpec | None = None
    custom: _CustomSpec | None = None

    def offered(self, where: str) -> tuple[ToolForm, Tool]:
        """Return the tool's form, and the tool as it is offered."""
        use_of(self.type, CHAT_TOOLS, where)
        if self.custom is not None:
            form = ToolForm(name=self.custom.name, custom=True)
            return form, custom_tool(form, self.custom.description, self.custom.format)
        if (function := self.function) is None:
            raise Refusal(400, f"{where}: a tool needs 'function' or 'custom'")
        return ToolForm(name=function.name), function_tool(function.name, function.description, function.parameters)


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
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@final
@attrs.frozen
class ChatCompletions:
    """The Chat Completions API as an ``AgentProtocol``."""

    def request(self, body: bytes, answered: Answered = no_answer, image: str | None = None) -> ChatRequest:  # noqa: ARG002  requests here hold everything
        asked: _Body = decode_request(body, _Body, CHAT)
        at_least_one_message(asked.messages)
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        given = [] if asked.tool_choice == "none" else asked.tools or []
        tools = [tool.offered(f"tools[{place}]") for place, tool in enumerate(given)]
        variables = thinking_of(asked.reasoning_effort) | (asked.chat_template_kwargs or {})
        return ChatRequest(
            messages=tuple(_messages(asked.messages, image)),
            tools=tuple(tool for _, tool in tools),
            forms=forms_of(form for form, _ in tools),
            variables=checked_variables(variables, "chat_template_kwargs"),
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
            message["tool_calls"] = _calls(answer, request)
        choice = {"index": 0, "message": message, "finish_reason": answer.finish.value, "logprobs": None}
        return {**_head(answer.id, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def stream(self, turn: str, request: ChatRequest) -> "_Stream":
        return _Stream(turn, request)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")  # noqa: PLR2004
        return {"error": {"message": refusal.message, "type": kind, "param": None, "code": None}}


def _messages(asked: Sequence[_Message], image: str | None) -> Iterator[Message]:
    task = True
    for place, message in enumerate(asked):
        task = task and message.role != "assistant"
        yield message.as_message(f"messages[{place}]", task=task, image=image)


def text_of(content: str | list[Part] | None, known: Kinds, where: str, how: Reading) -> str:
    """Return the text of a message's content; see ``text_of_part``."""
    if content is None or isinstance(content, str):
        return content or ""
    return join_text(_part(part, known, where, how) for part in content)


def _part(part: Part, known: Kinds, where: str, how: Reading) -> str:
    image = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
    return text_of_part(part.type, part.text or part.refusal, known, where, how, image)


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

    def keep_alive(self) -> bytes:
        return self._chunk({"content": ""})

    def end(self, answer: Answer, rest: str, thoughts: str) -> bytes:
        parts = [self.thoughts(thoughts)] if thoughts else []
        if rest:
            parts.append(self.text(rest))
        parts += [
            self._chunk({"tool_calls": [{"index": at, **call}]}) for at, call in enumerate(_calls(answer, self.request))
        ]
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


def _calls(answer: Answer, request: ChatRequest) -> list[dict[str, Any]]:
    return [_call(call, request.forms.get(call.name)) for call in answer.calls]


def _call(call: ToolUse, form: ToolForm | None) -> dict[str, Any]:
    if form is not None and form.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text_input(call.arguments)}}
    return tool_call(call.id, call.name, call.arguments)


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
