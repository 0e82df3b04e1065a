"""Scripted answers, chosen by the prompt: for demonstrations in which the model must give certain answers."""

import re
import tomllib
from pathlib import Path
from typing import final

import attrs
import msgspec

from ..errors import SettingsError
from ._body import as_list

_MESSAGE_START = "<|im_start|>"


class Rule(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One rule: all of its conditions must hold.

    ``contains``: the prompt contains all of these. ``lacks``: the prompt contains none of these. ``last_contains``: the last
    message that is not empty contains all of these. ``matches``: the prompt contains a match of this regular expression.
    ``turn``: the number of answers that the prompt already contains. ``answer``: the text; ``{1}`` in it is the pattern's first
    group. ``calls``: tool calls written behind the text in the tokenizer's format.
    """

    contains: str | list[str] = []
    lacks: str | list[str] = []
    last_contains: str | list[str] = []
    matches: str | None = None
    turn: int | None = None
    answer: str = ""
    calls: list["ToolCall"] = []


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A tool call of an answer."""

    name: str
    arguments: dict[str, object] = {}


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    rules: list[Rule]


@final
@attrs.frozen(eq=False, repr=False)
class Script:
    """The rules of one file. The first rule that fits answers; if none fits, the model does."""

    rules: tuple[Rule, ...]

    def __repr__(self) -> str:
        return f"<Script {len(self.rules)} rules>"

    @classmethod
    def load(cls, path: Path) -> "Script":
        """Read a ``.toml`` or ``.json`` file with a list ``rules``.

        Raises:
          SettingsError: the file cannot be read, or has another form.
        """
        try:
            data = path.read_bytes()
            parsed = tomllib.loads(data.decode()) if path.suffix == ".toml" else msgspec.json.decode(data)
            rules = msgspec.convert(parsed, _File).rules
            for rule in rules:
                re.compile(rule.matches or "")
        except (OSError, ValueError, re.error) as error:
            raise SettingsError(f"TinySettings.script: cannot use {path}: {error}") from error
        return cls(tuple(rules))

    def answer(self, prompt: str) -> str | None:
        """Return the answer of the first rule that fits, or None."""
        messages = [message for message in prompt.split(_MESSAGE_START) if message.strip()]
        written = sum(message.startswith("assistant\n") and len(message) > len("assistant\n") for message in messages)
        spoken = [message for message in messages if message.strip() != "assistant"]
        last = spoken[-1] if spoken else prompt
        for rule in self.rules:
            found = re.search(rule.matches or "", prompt)
            if (
                found
                and all(part in prompt for part in as_list(rule.contains))
                and not any(part in prompt for part in as_list(rule.lacks))
                and all(part in last for part in as_list(rule.last_contains))
                and rule.turn in {None, written}
            ):
                return _text(rule, found)
        return None


def _text(rule: Rule, found: re.Match[str]) -> str:
    text = rule.answer
    for place, group in enumerate(found.groups(), start=1):
        text = text.replace(f"{{{place}}}", group or "")
    calls = [f"<tool_call>\n{msgspec.json.encode(call).decode()}\n</tool_call>" for call in rule.calls]
    return "\n".join([*([text] if text else []), *calls])
