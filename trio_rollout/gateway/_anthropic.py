"""Anthropic's Messages API: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import attrs
import msgspec

from ..tokenizer._messages import arguments_of, function_tool, join_text, tool_call
from ._fields import MESSAGES, MESSAGES_PARTS, MESSAGES_TOOLS, Reading, Use, decode_request, text_of_part, use_of
from ._protocol import (
    Answered,
    Refusal,
    at_least_one_message,
    digest_of,
    event,
    json_schema_of,
    limit_of,
    no_answer,
    signature_of,
    stops_of,
    thinking_of,
)
from ._tools import require_hands, vendors_tool
from ._values import Answer, ChatRequest, Finish, Message, Tool

_STOP: Final = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.TOOL_CALLS: "tool_use"}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Source(msgspec.Struct):
    type: str = ""
    data: str = ""
    media_type: str = ""
    url: str | None = None
    content: "str | list[_Block] | None" = None


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    title: str | None = None
    source: str | _Source | None = None
    tool_name: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: "str | list[_Block] | None" = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Kind(msgspec.Struct):
    type: str = "auto"


class _OutputConfig(msgspec.Struct):
    format: dict[str, Any] | None = None
    effort: str | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int | None = None
    model: str = ""
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Kind | None = None
    thinking: _Kind | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    output_config: _OutputConfig | None = None


@final
@attrs.frozen
class Messages:
    """The Messages API as an ``AgentProtocol``."""

    def request(self, body: bytes, answered: Answered = no_answer, image: str | None = None) -> ChatRequest:  # noqa: ARG002  requests here hold everything
        asked: _Body = decode_request(body, _Body, MESSAGES)
        at_least_one_message(asked.messages)
        messages: list[Message] = []
        if asked.system:
            messages.append({"role": "system", "content": _text(asked.system, "system", Reading(task=True))})
        task = True
        for place, message in enumerate(asked.messages):
            task = task and message.role != "assistant"
            messages.extend(_messages(message, f"messages[{place}]", task=task, image=image))
        tools = _offered([] if asked.tool_choice and asked.tool_choice.type == "none" else asked.tools or [])
        config = asked.output_config or _OutputConfig()
        return ChatRequest(
            messages=tuple(messages),
            tools=tools,
            max_tokens=limit_of(asked.max_tokens),
            stop=stops_of(asked.stop_sequences, "stop_sequences"),
            temperature=asked.temperature,
            top_p=asked.top_p,
            stream=bool(asked.stream),
            model=asked.model,
            digest=digest_of("messages", body),
            extra=json_schema_of(config.format, "output_config.format"),
            variables=thinking_of(config.effort) | _thinking(asked.thinking),
        )

    def answer(self, answer: Answer, request: ChatRequest) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            blocks.append({
                "type": "thinking",
                "thinking": answer.reasoning,
                "signature": signature_of(answer.reasoning),
            })
        if answer.text or not answer.calls:
            blocks.append({"type": "text", "text": answer.text})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call.arguments)}
            for call in answer.calls
        ]
        return {**_head(answer.id, request), "content": blocks, **_end(answer), "usage": _usage(answer)}

    def stream(self, turn: str, request: ChatRequest) -> "_Stream":
        return _Stream(turn, request)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(refusal.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}}


@final
@attrs.define
class _Stream:
    turn: str
    request: ChatRequest
    _open: str = attrs.field(default="", init=False)
    _spoke: bool = attrs.field(default=False, init=False)
    _thoughts: str = attrs.field(default="", init=False)
    _index: int = attrs.field(default=0, init=False)

    def begin(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None}
        message = {**_head(self.turn, self.request), "content": [], **end, "usage": usage}
        return _named({"type": "message_start", "message": message})

    def thoughts(self, delta: str) -> bytes:
        if self._spoke:
            return b""  # thoughts after text can't be put before it any more
        self._thoughts += delta
        opened = self._opened({"type": "thinking", "thinking": "", "signature": ""})
        return opened + self._delta({"type": "thinking_delta", "thinking": delta})

    def text(self, delta: str) -> bytes:
        self._spoke = True
        return self._opened({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": delta})

    def keep_alive(self) -> bytes:
        return _named({"type": "ping"})

    def end(self, answer: Answer, rest: str, thoughts: str) -> bytes:
        parts = [self.thoughts(thoughts)] if thoughts else []
        if rest or not (self._spoke or answer.calls):
            parts.append(self.text(rest))
        parts.append(self._stop())
        for call in answer.calls:
            self._open = "tool_use"
            parts.append(self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}))
            parts += [self._delta({"type": "input_json_delta", "partial_json": call.arguments}), self._stop()]
        end = _named({"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)})
        return b"".join([*parts, end, _named({"type": "message_stop"})])

    def fail(self, refusal: Refusal) -> bytes:
        return _named(Messages().error(refusal))

    def _opened(self, block: dict[str, Any]) -> bytes:
        """Return the events that open this block, unless it is open, and close the block before it."""
        if self._open == block["type"]:
            return b""
        closed = self._stop()
        self._open = block["type"]
        return closed + self._start(block)

    def _start(self, block: dict[str, Any]) -> bytes:
        return _named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _named({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        """Return the event that closes the open block, if there is one."""
        if not (closed := self._open):
            return b""
        signature = {"type": "signature_delta", "signature": signature_of(self._thoughts)}
        signed = self._delta(signature) if closed == "thinking" else b""
        self._open = ""
        self._index += 1
        return signed + _named({"type": "content_block_stop", "index": self._index - 1})


def _named(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def _head(turn: str, request: ChatRequest) -> dict[str, Any]:
    return {"id": f"msg_{turn}", "type": "message", "role": "assistant", "model": request.model}


def _end(answer: Answer) -> dict[str, Any]:
    reason = "stop_sequence" if answer.stop_sequence is not None else _STOP[answer.finish]
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _offered(asked: Sequence[_Tool]) -> tuple[Tool, ...]:
    """Return the tools as they are offered."""
    tools: list[Tool] = []
    left_out: list[str] = []
    for place, tool in enumerate(asked):
        kind = tool.type or "custom"
        if use_of(kind, MESSAGES_TOOLS, f"tools[{place}]") is Use.LEFT_OUT:
            left_out.append(kind)
        elif kind == "custom":
            tools.append(function_tool(tool.name, tool.description, tool.input_schema))
        else:
            tools.append(vendors_tool(kind, tool.name))
    require_hands(len(tools), left_out)
    return tuple(tools)


def _thinking(asked: _Kind | None) -> dict[str, object]:
    """Return the chat template's variables for the thinking that a request switches on or off."""
    if asked is None:
        return {}
    on = asked.type != "disabled"
    return {"enable_thinking": on, "thinking": on}


def _text(content: str | list[_Block] | None, where: str, how: Reading) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return join_text(_part(block, where, how) for block in content)


def _part(block: _Block, where: str, how: Reading) -> str:
    """Return the text of a block; documents and search results may hold text."""
    source = block.source if isinstance(block.source, _Source) else _Source()
    if block.type == "document" and source.type in {"text", "content"}:
        return join_text([block.title or "", source.data, _text(source.content, where, how)])
    if block.type == "search_result":
        name = block.source if isinstance(block.source, str) else ""
        return join_text([block.title or "", name, _text(block.content, where, how)])
    image = None
    if block.type == "image":
        image = f"data:{source.media_type};base64,{source.data}" if source.type == "base64" else source.url
    return text_of_part(block.type, block.text or block.tool_name, MESSAGES_PARTS, where, how, image)


def _messages(message: _Message, where: str, *, task: bool, image: str | None) -> Iterator[Message]:
    """Yield one message with blocks as several: chat templates take each tool result as a separate message."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    for block in message.content:
        if block.type == "tool_result":
            how = Reading(task=False, markup=image)
            result = {"tool_call_id": block.tool_use_id, "content": _text(block.content, where, how)}
            yield {"role": "tool", **result, **({"images": how.images} if how.images else {})}
    how = Reading(task=task, markup=image)
    rest: dict[str, Any] = {"role": message.role, "content": _text(message.content, where, how)}
    if how.images:
        rest["images"] = how.images
    if thoughts := join_text(block.thinking for block in message.content):
        rest["reasoning_content"] = thoughts
    if calls := [block for block in message.content if block.type == "tool_use"]:
        rest["tool_calls"] = [tool_call(call.id, call.name, arguments_of(call.input)) for call in calls]
    if rest["content"] or calls or message.role == "assistant":
        yield rest
