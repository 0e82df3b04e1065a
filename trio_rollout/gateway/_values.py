"""What the protocols have in common: a request for one turn, and its answer."""

import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs

Message: TypeAlias = Mapping[str, Any]
"""One message as chat templates take it: role, content, tool_calls, reasoning_content."""
Tool: TypeAlias = Mapping[str, Any]
"""One tool as chat templates take it: OpenAI's ``{"type": "function", "function": {...}}``."""


@attrs.frozen(kw_only=True)
class ChatRequest:
    """What an agent asks for. ``key`` is the same for identical requests; ``again``: the client says it is a resend.

    ``previous`` is the id of the turn that it continues, if it names one: the messages then only go on from there.
    ``instructions`` of them, the first, stand before whatever came earlier and are not part of it. ``nameable``: a later
    request may name this one's turn.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    include_usage: bool = False
    model: str = ""
    key: str = ""
    again: bool = False
    previous: str = ""
    instructions: int = 0
    nameable: bool = False
    extra: Mapping[str, object] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Context:
    """How many tokens the model takes: prompt and answer together, and the longest prompt. None: nobody knows."""

    length: int | None = None
    longest_prompt: int | None = None
    """A real SGLang 0.5.23 refuses prompts that leave room for six tokens or fewer."""

    def room(self, prompt: int, asked: int) -> int:
        """How many of the tokens that are asked for may follow so long a prompt."""
        if self.longest_prompt is not None and prompt > self.longest_prompt:
            return 0
        return asked if self.length is None else max(0, min(asked, self.length - prompt))


class Finish(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, or a stop sequence did."""
    LENGTH = "length"
    """The token limit or the context budget was reached."""
    TOOL_CALLS = "tool_calls"
    """It calls tools."""


@attrs.frozen(kw_only=True)
class ToolUse:
    """One call of a tool; ``arguments`` is JSON text as the parser gave it."""

    id: str
    name: str
    arguments: str


@attrs.frozen(kw_only=True)
class Answer:
    """One turn's answer, parsed."""

    id: str
    text: str
    finish: Finish
    reasoning: str = ""
    calls: tuple[ToolUse, ...] = ()
    stop_sequence: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
