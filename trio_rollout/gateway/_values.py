"""The values that all protocols share: a request for one turn, and its answer."""

import enum
from collections.abc import Mapping
from typing import Any, TypeAlias, final

import attrs

Message: TypeAlias = Mapping[str, Any]
"""One message as chat templates take it: role, content, tool_calls, reasoning_content."""
Tool: TypeAlias = Mapping[str, Any]
"""One tool as chat templates take it: OpenAI's ``{"type": "function", "function": {...}}``."""


@final
@attrs.frozen(kw_only=True)
class ToolForm:
    """The shape of an agent's tool."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """True if a call has a text instead of arguments."""

    @property
    def offered(self) -> str:
        """The name under which a model calls it."""
        return offered_name(self.name, self.namespace)


def offered_name(name: str, namespace: str | None) -> str:
    """Return the name under which a model calls a tool: one name, also for a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


@attrs.frozen(kw_only=True)
class ChatRequest:
    """An agent's request for one turn, in any protocol."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    include_usage: bool = False
    """Ask for the token counts at the end of a stream."""
    model: str = ""
    digest: str = ""
    """The same for identical requests."""
    key: str = ""
    """The client's name for this one request (``Idempotency-Key``): the same whenever the request is sent again."""
    previous: str = ""
    """The id of the turn that this request continues; the messages then only go on from there."""
    instructions: int = 0
    """The number of first messages that stand before those of ``previous``; later requests do not inherit them."""
    store: bool = False
    """True if a later request may continue this one's turn by its id."""
    extra: Mapping[str, object] = attrs.field(factory=dict)
    """SGLang's sampling parameters for the format of the answer."""
    variables: Mapping[str, object] = attrs.field(factory=dict)
    """Variables of the chat template."""
    forms: Mapping[str, ToolForm] = attrs.field(factory=dict)
    """The shapes of the tools that are no plain functions, by the names under which they are offered."""
    encrypted: bool = False
    """True if the thoughts of an answer are to be sent in encrypted form as well."""


@attrs.frozen(kw_only=True)
class ContextLimits:
    """Limits of the model in tokens. None: unknown, and not enforced here."""

    sees: bool = False
    """True if the model reads images."""
    length: int | None = None
    """Prompt and answer together."""
    longest_prompt: int | None = None
    """The prompt alone. A real SGLang 0.5.23 refuses prompts that leave room for six tokens or fewer."""

    def room(self, prompt: int, wanted: int) -> int:
        """Return how many of the wanted tokens may follow a prompt of so many tokens."""
        if self.longest_prompt is not None and prompt > self.longest_prompt:
            return 0
        return wanted if self.length is None else max(0, min(wanted, self.length - prompt))


class Finish(enum.Enum):
    """The reason why an answer ended."""

    STOP = "stop"
    """The model ended the answer, or a stop sequence did."""
    LENGTH = "length"
    """The token limit or the context length was reached."""
    TOOL_CALLS = "tool_calls"
    """The answer calls tools."""


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
