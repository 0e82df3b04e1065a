"""Tool calls in a text, in the format of the shipped chat template: ``/parse_function_call`` as SGLang's parser qwen25."""

import json
import logging
import re
from typing import Any

import msgspec

_LOGGER = logging.getLogger("trio_rollout.tiny")
_BEGIN = "<tool_call>\n"
_BLOCK = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
PARSERS = frozenset({"qwen25", "qwen"})
"""The names under which this format goes."""


class Function(msgspec.Struct):
    """What a tool is called."""

    name: str


class Tool(msgspec.Struct):
    """A tool that the model may call, as in OpenAI's API."""

    function: Function


class ParseBody(msgspec.Struct, kw_only=True):
    """Body of ``/parse_function_call``."""

    text: str
    tools: list[Tool] = []
    tool_call_parser: str | None = None


def parse_tool_calls(text: str, tools: list[Tool]) -> dict[str, Any]:
    """The text before the first call, and the calls to tools that exist; what is no JSON or unknown is left out."""
    if not tools or _BEGIN not in text:
        return {"normal_text": text, "calls": []}
    places = {tool.function.name: place for place, tool in enumerate(tools)}
    calls = []
    for block in _BLOCK.findall(text):
        try:
            written = json.loads(block.strip())
        except json.JSONDecodeError as error:
            _LOGGER.warning("a tool call is no JSON: %s", error)
            continue
        for action in written if isinstance(written, list) else [written]:
            calls.extend(_call(action, places))
    return {"normal_text": text[: text.find(_BEGIN)].strip(), "calls": calls}


def _call(action: Any, places: dict[str, int]) -> list[dict[str, Any]]:
    name = action.get("name") if isinstance(action, dict) else None
    if name not in places:
        _LOGGER.warning("a call to a tool that does not exist: %s", name)
        return []
    arguments = action.get("parameters") or action.get("arguments", {})
    return [{"tool_index": places[name], "name": name, "parameters": json.dumps(arguments, ensure_ascii=False)}]
