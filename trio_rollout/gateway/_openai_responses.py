"""OpenAI's Responses API: ``POST /v1/responses``.

The input is a list of items. The items of one answer (thoughts, text, calls) become one message, as chat templates take
it; an answer becomes items again.
"""

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import attrs
import msgspec

from ..tokenizer._messages import arguments_of, function_tool, join_text, tool_call
from ._fields import RESPONSES, RESPONSES_ITEMS, RESPONSES_PARTS, RESPONSES_TOOLS, Reading, Use, decode_request, use_of
from ._openai_chat import ChatCompletions, Part, text_of
from ._protocol import (
    Answered,
    Refusal,
    at_least_one_message,
    digest_of,
    event,
    json_schema_of,
    limit_of,
    no_answer,
    thinking_of,
)
from ._tools import INPUT, custom_tool, forms_of, require_hands, text_input
from ._values import Answer, ChatRequest, Finish, Message, Tool, ToolForm, ToolUse, offered_name

_RESPONSE: Final = "resp_"
_ENCRYPTED: Final = "reasoning.encrypted_content"
_LOG_PROBS: Final = "message.output_text.logprobs"
# The ids of an answer's items: its kind, its turn, and for a call its place among the calls.
_ITEM_ID: Final = re.compile(r"(rs|msg|fc_call|ctc_call)_([0-9a-f]{32})(\d*)")


class _Item(msgspec.Struct):
    """An input item of any type; the type says which fields count."""

    type: str | None = "message"
    id: str | None = None
    role: str = "user"
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = "{}"
    input: str = ""
    output: str | list[Part] | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    tools: "list[_Tool] | None" = None

    def offered(self, where: str, namespace: str | None = None) -> Iterator[tuple[ToolForm, Tool]]:
        """Yield the tool's form, and the tool as it is offered; a namespace is several tools."""
        if not self.name:
            raise Refusal(400, f"{where}: a tool of type {self.type!r} needs a name")
        if self.type == "namespace" and namespace is None:
            for place, tool in enumerate(self.tools or ()):
                use_of(tool.type, RESPONSES_TOOLS, f"{where}.tools[{place}]")
                yield from tool.offered(f"{where}.tools[{place}]", self.name)
            return
        form = ToolForm(name=self.name, namespace=namespace, custom=self.type == "custom")
        if form.custom:
            yield form, custom_tool(form, self.description, self.format)
        elif self.type == "function":
            yield form, function_tool(form.offered, self.description, self.parameters)
        else:
            raise Refusal(400, f"{where}: a tool of type {self.type!r} can't stand in a namespace")


class _Reasoning(msgspec.Struct):
    effort: str | None = None


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
    text: _Text | None = None
    store: bool | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None


@final
@attrs.frozen
class Responses:
    """The Responses API as an ``AgentProtocol``.

    A request has its whole conversation, or the id of the response that it continues.
    """

    def request(self, body: bytes, answered: Answered = no_answer, image: str | None = None) -> ChatRequest:
        asked: _Body = decode_request(body, _Body, RESPONSES)
        include = asked.include or []
        if _LOG_PROBS in include:
            raise Refusal(400, f"include: {_LOG_PROBS}: log-probs are recorded for the trainer and not sent to agents")
        items = [_Item(content=asked.input)] if isinstance(asked.input, str) else asked.input
        at_least_one_message(items)
        first: list[Message] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        tools = _offered([] if asked.tool_choice == "none" else asked.tools or [])
        previous = (asked.previous_response_id or "").removeprefix(_RESPONSE)
        return ChatRequest(
            messages=(*first, *_messages(items, answered, task=not previous, image=image)),
            tools=tuple(tool for _, tool in tools),
            forms=forms_of(form for form, _ in tools),
            variables=thinking_of(asked.reasoning.effort if asked.reasoning else None),
            max_tokens=limit_of(asked.max_output_tokens),
            temperature=asked.temperature,
            top_p=asked.top_p,
            stream=bool(asked.stream),
            model=asked.model,
            digest=digest_of("responses", body),
            previous=previous,
            instructions=len(first),
            store=asked.store is not False,
            extra=json_schema_of(asked.text.format if asked.text else None, "text.format"),
            encrypted=_ENCRYPTED in include,
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

    def keep_alive(self) -> bytes:
        return self._event("response.in_progress", response=_response(self.turn, self.request, None))

    def end(self, answer: Answer, rest: str, thoughts: str) -> bytes:
        parts: list[bytes] = [self.thoughts(thoughts)] if thoughts else []
        if rest or not (self._spoke or answer.calls):
            parts.append(self.text(rest))
        parts.append(self._close())
        parts += [self._call(_call_item(call, self.request)) for call in answer.calls]
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
        return done + self._item_done(self._item(shape))

    def _item(self, shape: _Shape) -> dict[str, Any]:
        """Return the item with the text so far."""
        item = shape.item(self.turn, self._shown)
        return item | _sealed(self._shown, self.request) if shape is _THOUGHTS else item

    def _text_event(self, shape: _Shape, what: str, **text: str) -> bytes:
        kind = f"response.{shape.part('')['type']}.{what}"
        return self._event(kind, **self._place(shape), **text, **shape.more)

    def _place(self, shape: _Shape) -> dict[str, Any]:
        return {"item_id": f"{shape.id}{self.turn}", "output_index": self._index, "content_index": 0}

    def _call(self, item: dict[str, Any]) -> bytes:
        where = {"item_id": item["id"], "output_index": self._index}
        custom = item["type"] == "custom_tool_call"
        name = "input" if custom else "arguments"
        kind = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        named = {} if custom else {"name": item["name"]}
        return b"".join([
            self._event("response.output_item.added", output_index=self._index, item=_started(item, name)),
            self._event(f"{kind}.delta", **where, delta=item[name]),
            self._event(f"{kind}.done", **where, **named, **{name: item[name]}),
            self._item_done(item),
        ])

    def _item_done(self, item: dict[str, Any]) -> bytes:
        self._index += 1
        return self._event("response.output_item.done", output_index=self._index - 1, item=item)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)


def _offered(asked: Sequence[_Tool]) -> list[tuple[ToolForm, Tool]]:
    """Return the forms of the tools, and the tools as they are offered."""
    tools: list[tuple[ToolForm, Tool]] = []
    left_out: list[str] = []
    for place, tool in enumerate(asked):
        if use_of(tool.type, RESPONSES_TOOLS, f"tools[{place}]") is Use.LEFT_OUT:
            left_out.append(tool.type)
        else:
            tools += tool.offered(f"tools[{place}]")
    require_hands(len(tools), left_out)
    return tools


_OF_AN_ANSWER: Final = frozenset({"reasoning", "function_call", "custom_tool_call", "item_reference"})


def _messages(items: list[_Item], answered: Answered, *, task: bool, image: str | None) -> Iterator[Message]:
    """Yield the items as messages: those of one answer (thoughts, text, calls) as one message.

    ``task`` is true if no answer stands before the first item.
    """
    answer: dict[str, Any] | None = None
    for place, item in enumerate(items):
        where, kind = f"input[{place}]", _kind_of(item)
        use_of(kind, RESPONSES_ITEMS, where)
        if kind in _OF_AN_ANSWER or (kind == "message" and item.role == "assistant"):
            answer, task = answer or {"role": "assistant", "content": ""}, False
            _add_to(answer, kind, item, answered, where)
            continue
        if answer is not None:
            yield answer
            answer = None
        yield _other(item, kind, where, Reading(task=task and kind == "message", markup=image))
    if answer is not None:
        yield answer


def _kind_of(item: _Item) -> str:
    """Return the item's type; one that has only an id is a reference, with or without its type."""
    if item.type in {None, "message"} and item.content is None and item.id:
        return "item_reference"
    return item.type or "message"


def _add_to(answer: dict[str, Any], kind: str, item: _Item, answered: Answered, where: str) -> None:
    """Add one item of an answer to the message that it belongs to."""
    if kind == "item_reference":
        _add_reference(answer, item.id or "", answered, where)
    elif kind == "reasoning":
        parts = [_text(item.summary, where), _text(item.content, where)]
        if thoughts := join_text(parts) or _opened(item.encrypted_content):
            answer["reasoning_content"] = thoughts
    elif kind == "message":
        answer["content"] = join_text([answer["content"], _text(item.content, where)])
    else:
        custom = kind == "custom_tool_call"
        arguments = {INPUT: item.input} if custom else arguments_of(item.arguments)
        call = tool_call(item.call_id, offered_name(item.name, item.namespace), arguments)
        answer.setdefault("tool_calls", []).append(call)


def _add_reference(answer: dict[str, Any], name: str, answered: Answered, where: str) -> None:
    """Add the part of an answer of this session that an id names."""
    found = _ITEM_ID.fullmatch(name)
    message = (answered(found[2]) if found else None) or {}
    calls, place = message.get("tool_calls") or (), int(found[3] or 0) if found else 0
    if found is None or not message or ("call" in found[1] and place >= len(calls)):
        raise Refusal(400, f"{where}: this session has no item {name!r} among its last answers; send the item itself")
    if found[1] == "rs":
        answer["reasoning_content"] = message.get("reasoning_content", "")
    elif found[1] == "msg":
        answer["content"] = join_text([answer["content"], message["content"]])
    else:
        answer.setdefault("tool_calls", []).append(calls[place])


def _text(content: str | list[Part] | None, where: str) -> str:
    return text_of(content, RESPONSES_PARTS, where, Reading(task=False))


def _other(item: _Item, kind: str, where: str, how: Reading) -> Message:
    content = item.content if kind == "message" else item.output
    message: dict[str, Any] = {"content": text_of(content, RESPONSES_PARTS, where, how)}
    if how.images:
        message["images"] = how.images
    if kind != "message":
        return {"role": "tool", "tool_call_id": item.call_id, **message}
    return {"role": "system" if item.role == "developer" else item.role, **message}


def _sealed(thoughts: str, request: ChatRequest) -> dict[str, str]:
    """Return the encrypted form of thoughts, if it was asked for. It hides nothing, and brings the thoughts back."""
    return {"encrypted_content": base64.b64encode(thoughts.encode()).decode()} if request.encrypted else {}


def _opened(sealed: str | None) -> str:
    """Return the thoughts in their encrypted form; empty if they are another vendor's."""
    try:
        return base64.b64decode(sealed or "", validate=True).decode()
    except ValueError:
        return ""


def _started(item: dict[str, Any], name: str) -> dict[str, Any]:
    return {**item, "status": "in_progress", name: ""}


def _call_item(call: ToolUse, request: ChatRequest) -> dict[str, Any]:
    """Return a call in the shape of its tool."""
    form = request.forms.get(call.name) or ToolForm(name=call.name)
    item: dict[str, Any] = {"status": "completed", "call_id": call.id, "name": form.name}
    if form.namespace is not None:
        item["namespace"] = form.namespace
    if form.custom:
        return {"id": f"ctc_{call.id}", "type": "custom_tool_call", **item, "input": text_input(call.arguments)}
    return {"id": f"fc_{call.id}", "type": "function_call", **item, "arguments": call.arguments}


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


def _output(answer: Answer, request: ChatRequest) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append(_thoughts_item(answer.id, answer.reasoning) | _sealed(answer.reasoning, request))
    if answer.text or not answer.calls:
        items.append(_message_item(answer.id, answer.text))
    return [*items, *(_call_item(call, request) for call in answer.calls)]


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
        "output": [] if answer is None else _output(answer, request),
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
