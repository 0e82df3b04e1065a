"""OpenAI's Responses API: ``POST /v1/responses``.

The input is a list of items. The items of one answer (thoughts, text, calls) become one message, as chat templates take
it; an answer becomes items again.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import attrs
import msgspec

from ..tokenizer._messages import TEXT_PARTS, arguments_of, function_tool, join_text, tool_call
from ._openai_chat import ChatCompletions, Part, text_of
from ._protocol import (
    Refusal,
    at_least_one_message,
    decode_body,
    digest_of,
    event,
    json_schema_of,
    limit_of,
)
from ._values import Answer, ChatRequest, Finish, Message

_RESPONSE: Final = "resp_"
_TEXT: Final = (*TEXT_PARTS, "summary_text", "reasoning_text")


class _Item(msgspec.Struct):
    """An input item of any type; the type says which fields count."""

    type: str = "message"
    role: str = "user"
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[Part] | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    text: _Text | None = None
    top_logprobs: int | None = None
    store: bool | None = None


@final
@attrs.frozen
class Responses:
    """The Responses API as an ``AgentProtocol``.

    A request has its whole conversation, or the id of the response that it continues.
    """

    def request(self, body: bytes) -> ChatRequest:
        asked: _Body = decode_body(body, _Body)
        if asked.conversation is not None or asked.background:
            raise Refusal(
                400, "conversation and background are not supported: use previous_response_id, and wait for the answer"
            )
        if asked.top_logprobs:
            raise Refusal(400, "top_logprobs: log-probs are recorded for the trainer and not sent to agents")
        items = [_Item(content=asked.input)] if isinstance(asked.input, str) else asked.input
        at_least_one_message(items)
        first: list[Message] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        # Tools of other types are run by OpenAI itself (web search, …), so they are left out.
        tools = [] if asked.tool_choice == "none" else [tool for tool in asked.tools or () if tool.type == "function"]
        return ChatRequest(
            messages=(*first, *_messages(items)),
            tools=tuple(function_tool(tool.name or "", tool.description, tool.parameters) for tool in tools),
            max_tokens=limit_of(asked.max_output_tokens),
            temperature=asked.temperature,
            top_p=asked.top_p,
            stream=bool(asked.stream),
            model=asked.model,
            digest=digest_of("responses", body),
            previous=(asked.previous_response_id or "").removeprefix(_RESPONSE),
            instructions=len(first),
            store=asked.store is not False,
            extra=json_schema_of(asked.text.format if asked.text else None, "text.format"),
        )

    def answer(self, answer: Answer, request: ChatRequest) -> dict[str, Any]:
        return _response(answer.id, request, answer)

    def stream(self, turn: str, request: ChatRequest) -> "_Stream":
        return _Stream(turn, request)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return ChatCompletions().error(refusal)


@attrs.frozen
class _Shape:
    """An item with streamed text: its part with the text, the finished item, and the fields that only one kind has."""

    id: str
    part: Callable[[str], dict[str, Any]]
    item: Callable[[str, str], dict[str, Any]]
    started: Mapping[str, Any] = attrs.field(factory=dict)
    more: Mapping[str, Any] = attrs.field(factory=dict)


@final
@attrs.define
class _Stream:
    turn: str
    request: ChatRequest
    _open: _Shape | None = attrs.field(default=None, init=False)
    _shown: str = attrs.field(default="", init=False)
    """The text of the open item."""
    _spoke: bool = attrs.field(default=False, init=False)
    _index: int = attrs.field(default=0, init=False)
    _sequence: int = attrs.field(default=0, init=False)

    def begin(self) -> bytes:
        response = _response(self.turn, self.request, None)
        events = [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]
        return b"".join(events)

    def thoughts(self, delta: str) -> bytes:
        return b"" if self._spoke else self._add(_THOUGHTS, delta)  # thoughts can't be put before text any more

    def text(self, delta: str) -> bytes:
        self._spoke = True
        return self._add(_MESSAGE, delta)

    def end(self, answer: Answer, rest: str, thoughts: str) -> bytes:
        parts: list[bytes] = [self.thoughts(thoughts)] if thoughts else []
        if rest or not (self._spoke or answer.calls):
            parts.append(self.text(rest))
        parts.append(self._close())
        parts += [self._call(item) for item in _output(answer) if item["type"] == "function_call"]
        kind = "response.incomplete" if answer.finish is Finish.LENGTH else "response.completed"
        parts.append(self._event(kind, response=_response(self.turn, self.request, answer)))
        return b"".join(parts)

    def fail(self, refusal: Refusal) -> bytes:
        kind = "rate_limit_exceeded" if refusal.status == 429 else "server_error"  # noqa: PLR2004
        failed = {"status": "failed", "error": {"code": kind, "message": refusal.message}}
        return self._event("response.failed", response=_response(self.turn, self.request, None) | failed)

    def _add(self, shape: _Shape, delta: str) -> bytes:
        """Return the events for more text of this item; close the one before it and open this one, unless it is open."""
        opened = b"" if self._open is shape else self._close() + self._start(shape)
        self._shown += delta
        return opened + self._text_event(shape, "delta", delta=delta)

    def _start(self, shape: _Shape) -> bytes:
        self._open, self._shown = shape, ""
        item = {**shape.item(self.turn, ""), **shape.started, "content": []}
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return added + self._event("response.content_part.added", **self._place(shape), part=shape.part(""))

    def _close(self) -> bytes:
        if (shape := self._open) is None:
            return b""
        self._open = None
        done = self._text_event(shape, "done", text=self._shown)
        done += self._event("response.content_part.done", **self._place(shape), part=shape.part(self._shown))
        return done + self._item_done(shape.item(self.turn, self._shown))

    def _text_event(self, shape: _Shape, what: str, **text: str) -> bytes:
        kind = f"response.{shape.part('')['type']}.{what}"
        return self._event(kind, **self._place(shape), **text, **shape.more)

    def _place(self, shape: _Shape) -> dict[str, Any]:
        return {"item_id": f"{shape.id}{self.turn}", "output_index": self._index, "content_index": 0}

    def _call(self, item: dict[str, Any]) -> bytes:
        where = {"item_id": item["id"], "output_index": self._index}
        started = {**item, "status": "in_progress", "arguments": ""}
        return b"".join([
            self._event("response.output_item.added", output_index=self._index, item=started),
            self._event("response.function_call_arguments.delta", **where, delta=item["arguments"]),
            self._event(
                "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
            ),
            self._item_done(item),
        ])

    def _item_done(self, item: dict[str, Any]) -> bytes:
        self._index += 1
        return self._event("response.output_item.done", output_index=self._index - 1, item=item)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)


def _messages(items: list[_Item]) -> Iterator[Message]:
    """Yield the items as messages: those of one answer (thoughts, text, calls) as one message."""
    answer: dict[str, Any] | None = None
    for place, item in enumerate(items):
        if item.type in {"reasoning", "function_call"} or (item.type == "message" and item.role == "assistant"):
            answer = answer or {"role": "assistant", "content": ""}
            _add_to(answer, item, f"input[{place}]")
            continue
        if answer is not None:
            yield answer
            answer = None
        yield _other(item, f"input[{place}]")
    if answer is not None:
        yield answer


def _add_to(answer: dict[str, Any], item: _Item, where: str) -> None:
    if item.type == "reasoning":
        if thoughts := join_text([text_of(item.summary, _TEXT, where), text_of(item.content, _TEXT, where)]):
            answer["reasoning_content"] = thoughts
    elif item.type == "function_call":
        call = tool_call(item.call_id, item.name, arguments_of(item.arguments))
        answer.setdefault("tool_calls", []).append(call)
    else:
        answer["content"] = join_text([answer["content"], text_of(item.content, _TEXT, where)])


def _other(item: _Item, where: str) -> Message:
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output, _TEXT, where)}
    if item.type != "message":
        raise Refusal(400, f"{where}: items of type {item.type!r} are not supported")
    return {"role": "system" if item.role == "developer" else item.role, "content": text_of(item.content, _TEXT, where)}


def _thoughts_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _thoughts_item(turn: str, text: str) -> dict[str, Any]:
    return {"id": f"rs_{turn}", "type": "reasoning", "summary": [], "content": [_thoughts_part(text)]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(turn: str, text: str) -> dict[str, Any]:
    item = {"id": f"msg_{turn}", "type": "message", "role": "assistant", "status": "completed"}
    return {**item, "content": [_text_part(text)]}


_THOUGHTS: Final = _Shape("rs_", _thoughts_part, _thoughts_item)
_MESSAGE: Final = _Shape("msg_", _text_part, _message_item, {"status": "in_progress"}, {"logprobs": []})


def _output(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append(_thoughts_item(answer.id, answer.reasoning))
    if answer.text or not answer.calls:
        items.append(_message_item(answer.id, answer.text))
    items += [
        {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in answer.calls
    ]
    return items


def _response(turn: str, request: ChatRequest, answer: Answer | None) -> dict[str, Any]:
    cut = answer is not None and answer.finish is Finish.LENGTH
    return {
        "id": _RESPONSE + turn,
        "object": "response",
        "created_at": 0,
        "status": "in_progress" if answer is None else "incomplete" if cut else "completed",
        "error": None,
        "previous_response_id": _RESPONSE + request.previous if request.previous else None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": [] if answer is None else _output(answer),
        "parallel_tool_calls": True,
        "temperature": request.temperature,
        "tool_choice": "auto",
        "tools": [],
        "top_p": request.top_p,
        "usage": None if answer is None else _usage(answer),
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
    }
