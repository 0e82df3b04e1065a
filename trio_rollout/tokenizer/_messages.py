"""Messages and tools in the form that chat templates read, from the forms that OpenAI's clients and data sets write.

A template prints what it gets: parts of a content as Python lists, a missing content as "None", arguments that are JSON text
encoded a second time. So prompts of a file, prompts of a program and the requests of agents all pass through here. A prompt
keeps its messages as they were given, because agents send them on.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
"""Types of a content's parts that are text."""
_TEXTS: Final = ("name", "tool_call_id", "reasoning_content")
"""Members of a message that are texts or missing."""
_ENCODED: Final = 2  # times
NO_OBJECT: Final = "arguments"
"""The member under which arguments stand that are no object."""
_MOST_SHOWN: Final = 80  # characters of a wrong value in an error


def normalized(messages: Sequence[Mapping[str, Any]], *, under: str = "") -> list[dict[str, Any]]:
    """Return the messages as chat templates read them. ``under`` says in errors where they stand.

    A content becomes text, arguments become an object, the role "developer" becomes "system"; missing members are left out.
    Members that this function does not know stay as they are: a model's own template may read them.

    Raises:
      ValueError, TypeError: a message can't be read; names the message and the member.
    """
    return [_message(message, f"message {place}{under}") for place, message in enumerate(messages)]


def normalized_tools(tools: object) -> list[dict[str, Any]]:
    """Return tools as chat templates read them, from a list, or a JSON text with a list, of OpenAI's form.

    Raises:
      ValueError, TypeError: this is no list of tools; names the tool and the member.
    """
    if isinstance(tools, str):
        try:
            tools = msgspec.json.decode(tools)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"a text that is not JSON: {error}") from error
    if not isinstance(tools, Sequence):
        raise TypeError(f"must be a list of tools, got {_shown(tools)}")
    return [_tool(tool, f"tool {place}") for place, tool in enumerate(tools)]


def arguments_of(given: object) -> dict[str, Any]:
    """Return a call's arguments as chat templates and agents want them: an object, whatever the model wrote.

    A text is read as JSON, and so is a JSON text inside it, because some models and clients encode twice. What is no object
    then becomes an object with one member.
    """
    value = given
    for _ in range(_ENCODED):
        if not isinstance(value, str):
            break
        try:
            # json would accept half characters and endless nesting, which can't be encoded again.
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, ValueError):  # ValueError: a number of too many digits
            break
    if isinstance(value, Mapping):
        return dict(value)
    empty = value is None or (isinstance(value, str) and not value)
    return {} if empty else {NO_OBJECT: value}


def continues(messages: Sequence[Mapping[str, object]]) -> bool:
    """Return True if the conversation ends with words of the assistant, which the answer continues."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    return last.get("role") == "assistant" and not last.get("tool_calls") and isinstance(content, str) and bool(content)


def join_text(parts: Iterable[str]) -> str:
    """Join the pieces of one message's text."""
    return "\n".join(part for part in parts if part)


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a tool as chat templates and SGLang's parsers take it."""
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def tool_call(call: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of a tool, whose id is ``call``, as a message of a chat holds it."""
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} lacks a 'role' that is a string: {_shown(message)}")
    if message.get("function_call") is not None:
        raise ValueError(f"{where}: 'function_call' is OpenAI's former form of a call; give 'tool_calls'")
    content = [_content(message.get("content"), where), _text(message, "refusal", where)]
    known: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": join_text(content)}
    known |= {name: text for name in _TEXTS if (text := _text(message, name, where))}
    if calls := message.get("tool_calls"):
        known["tool_calls"] = _calls(calls, where)
    rest = ("role", "content", "refusal", "function_call", "tool_calls", *_TEXTS)
    return known | {name: value for name, value in message.items() if name not in rest and value is not None}


def _content(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise TypeError(f"{where}: the content must be a text or a list of parts, got {_shown(content)}")
    return join_text(_part(part, where) for part in content)


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in TEXT_PARTS:
        found = f"of type {kind!r}" if isinstance(kind, str) else _shown(part)
        raise ValueError(f"{where}: content {found} can't be tokenized, only parts of type {', '.join(TEXT_PARTS)} can")
    return _text(part, "refusal" if kind == "refusal" else "text", where)


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TypeError(f"{where}: 'tool_calls' must be a list, got {_shown(calls)}")
    return [_call(call, f"{where}: tool call {place}") for place, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise TypeError(f"{where} lacks a 'function' that is an object: {_shown(call)}")
    if not (name := _text(function, "name", where)):
        raise ValueError(f"{where} lacks a 'name': {_shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    elif not isinstance(arguments, Mapping | None):
        raise TypeError(f"{where}: 'arguments' must be an object, or JSON text, got {_shown(arguments)}")
    return tool_call(_text(call, "id", where), name, {} if arguments is None else arguments)


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise TypeError(f"{where} must be an object, got {_shown(tool)}")
    if (kind := tool.get("type", "function")) != "function":
        raise ValueError(f"{where}: type {kind!r} can't be shown to a model, only 'function' can")
    function = tool.get("function", tool)  # the Responses API writes a tool's members without this level
    if not isinstance(function, Mapping) or not (name := _text(function, "name", where)):
        raise ValueError(f"{where} lacks a 'name': {_shown(tool)}")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise TypeError(f"{where}: 'parameters' must be an object, got {_shown(parameters)}")
    return function_tool(name, _text(function, "description", where), parameters)


def _text(holder: Mapping[str, Any], name: str, where: str) -> str:
    """Return a member that is a text; empty if it is missing or null."""
    value = holder.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{where}: {name!r} must be a string, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
