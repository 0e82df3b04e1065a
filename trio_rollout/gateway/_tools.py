"""Tools of every kind that a vendor's API has, as the functions that a chat template can offer, and the way back.

A model calls functions with an object of arguments. A *custom* tool takes one text: it is offered as a function with the
argument ``input``. Tools of a *namespace* are offered under joined names. The answer's writer gives each call back in the
shape of its tool: see ``ToolForm``. Tools that only the vendor could run have a line in ``_fields.py``: they are left out, or refused
where an agent without them would have no hands.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from ..tokenizer._messages import NO_OBJECT, arguments_of, function_tool
from ._protocol import Refusal
from ._values import Tool, ToolForm

INPUT: Final = "input"
"""The one argument of a custom tool."""


_TYPES: Final[Mapping[str, Any]] = {
    "restart": {"type": "boolean"},
    "insert_line": {"type": "integer"},
    "view_range": {"type": "array", "items": {"type": "integer"}},
}
_VENDORS: Final = {
    "bash": ("Run a shell command; the shell is kept between calls, and restart begins a new one.", "command restart"),
    "text_editor": (
        "View, create or change a text file. command is one of view, create, str_replace, insert.",
        "command path file_text old_str new_str insert_line insert_text view_range",
    ),
    "memory": (
        "Keep files between conversations. command is one of view, create, str_replace, insert, delete, rename.",
        "command path file_text old_str new_str insert_line insert_text old_path new_path view_range",
    ),
}


def custom_tool(form: ToolForm, description: str | None, syntax: Mapping[str, Any] | None) -> Tool:
    """Return a custom tool as a function; ``syntax`` is the format of its text, which only the description can name."""
    rule = (syntax or {}).get("grammar", syntax) or {}
    told = [description or ""]
    if definition := rule.get("definition"):
        told.append(f"The input follows this grammar ({rule.get('syntax')}):\n{definition}")
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return function_tool(form.offered, "\n\n".join(filter(None, told)), parameters)


def forms_of(forms: Iterable[ToolForm]) -> dict[str, ToolForm]:
    """Return the forms by the offered name.

    Raises:
      Refusal: two tools would be called by the same name, and their calls could not be told apart.
    """
    found: dict[str, ToolForm] = {}
    for form in forms:
        if found.setdefault(form.offered, form) != form:
            raise Refusal(400, f"tools: two tools would be called {form.offered!r}; give one of them another name")
    return found


def require_hands(offered: int, left_out: Iterable[str]) -> None:
    """Refuse a request all of whose tools were left out: its agent could do nothing."""
    names = sorted(set(left_out))
    if names and not offered:
        raise Refusal(400, f"tools: {', '.join(names)} would be run by the vendor, and no other tool is given")


def text_input(written: str) -> str:
    """Return the text of a custom tool's call from its arguments, as ``custom_arguments`` wrote them."""
    return str(arguments_of(written)[INPUT])


def custom_arguments(written: str) -> str:
    """Return the arguments of a custom tool's call, as JSON, from what a model wrote."""
    arguments = arguments_of(written)
    text = arguments.get(INPUT, arguments.get(NO_OBJECT))
    return msgspec.json.encode({INPUT: text if isinstance(text, str) else written}).decode()


def vendors_tool(kind: str, name: str) -> Tool:
    """Return a tool of Anthropic's that the agent runs and whose schema only the vendor's models know, with a schema."""
    told, members = next(given for prefix, given in _VENDORS.items() if kind.startswith(prefix))
    properties = {member: _TYPES.get(member, {"type": "string"}) for member in members.split()}
    return function_tool(name, told, {"type": "object", "properties": properties})
