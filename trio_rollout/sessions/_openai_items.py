"""What stands in the input of OpenAI's Responses API, as messages that chat templates take."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ._conversation import arguments_of
from ._protocol import joined, refuse_unless_text
from ._refusal import Refusal
from ._values import Message

_TEXT: Final = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""


class Item(msgspec.Struct):
    """An input item of any kind; which fields count depends on its type."""

    type: str = "message"
    role: str = "user"
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[_Part] | None = None


def messages_of(items: list[Item]) -> Iterator[Message]:
    """Items that belong to one answer (thoughts, text, calls) become one message again."""
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


def _add_to(answer: dict[str, Any], item: Item, where: str) -> None:
    if item.type == "reasoning":
        if thoughts := joined([_text(item.summary, where), _text(item.content, where)]):
            answer["reasoning_content"] = thoughts
    elif item.type == "function_call":
        function = {"name": item.name, "arguments": arguments_of(item.arguments)}
        answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    else:
        answer["content"] = joined([answer["content"], _text(item.content, where)])


def _other(item: Item, where: str) -> Message:
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, where)}
    if item.type != "message":
        raise Refusal(400, f"{where}: items of type {item.type!r} are not supported")
    return {"role": "system" if item.role == "developer" else item.role, "content": _text(item.content, where)}


def _text(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        refuse_unless_text(part.type, _TEXT, where)
    return joined(part.text or part.refusal for part in content)
