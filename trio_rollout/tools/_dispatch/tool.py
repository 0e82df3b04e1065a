"""What a tool is, and who watches or checks its calls: the seams of dispatch."""

import abc
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias, final

import attrs
import trio

from ...errors import RolloutError, ToolError
from .turn import TurnCancellation
from .values import Outcome, Source, ToolCall, ToolName, ToolOutput


class RespondToModel(RolloutError):
    """A tool's answer that is an error for the model to read, not a failure of the rollout."""


class FatalToolError(ToolError):
    """Ends the turn: what was called can't be what was meant."""


@attrs.frozen(kw_only=True)
class Invocation:
    """What a handler is given. ``turn`` is for handlers that want to watch it; their scope is cancelled by it anyway."""

    call: ToolCall
    payload: object
    turn: TurnCancellation
    source: Source

    @property
    def call_id(self) -> str:
        """The model's id of this call."""
        return self.call.call_id

    def arguments(self) -> Mapping[str, object]:
        """The payload of a function call.

        Raises:
          FatalToolError: it is none.

        """
        if not isinstance(self.payload, Mapping):
            raise FatalToolError(f"tool {self.call.name}: arguments are {type(self.payload).__name__}, not an object")
        return self.payload


class Tool(Protocol):
    """Something a model can call. Stateless, or with a state of its own that outlives its calls."""

    name: ToolName
    supports_parallel: bool = False
    """Whether it may run beside other tools that allow it too."""

    def accepts(self, payload: object) -> bool:
        """Whether this is the kind of payload it takes."""
        return isinstance(payload, Mapping)

    async def wait_until_ready(self) -> None:
        """Wait until it can be called. Runs outside the gate, so that a slow start holds up nobody else."""
        await trio.lowlevel.checkpoint()

    @abc.abstractmethod
    async def handle(self, invocation: Invocation) -> ToolOutput:
        """Do it. Cancelled when the turn is.

        Raises:
          RespondToModel: the model should read this.
          ToolError: infrastructure failed; ends the rollout.

        """

    def pre_hook_payload(self, invocation: Invocation) -> object | None:
        """What a hook checks before the handler; None: nothing to check."""
        return invocation.payload

    def with_updated_input(self, payload: object, rewritten: object) -> object:
        """The payload after a hook has rewritten what it was shown.

        Raises:
          RespondToModel: that makes no sense.

        """
        del payload
        return rewritten

    def post_hook_payload(self, output: ToolOutput) -> object | None:
        """What a hook checks after the handler; None: nothing to check."""
        return output.model_text()


def _named(registry: "ToolRegistry") -> dict[ToolName, Tool]:
    named = {tool.name: tool for tool in registry.tools}
    if len(named) != len(registry.tools):
        raise ValueError(f"tools need different names, got {[str(tool.name) for tool in registry.tools]}")
    return named


@final
@attrs.frozen(eq=False, repr=False)
class ToolRegistry:
    """Tools by canonical name.

    Raises:
      ValueError: two have the same.

    """

    tools: tuple[Tool, ...]
    _by_name: dict[ToolName, Tool] = attrs.field(init=False, default=attrs.Factory(_named, takes_self=True))

    def find(self, name: ToolName) -> Tool | None:
        """The tool of exactly this name and namespace."""
        return self._by_name.get(name)


def as_registry(tools: "ToolRegistry | Iterable[Tool]") -> ToolRegistry:
    """A registry, of whatever it is given as."""
    return tools if isinstance(tools, ToolRegistry) else ToolRegistry(tuple(tools))


@attrs.frozen(kw_only=True)
class LifecycleEvent:
    """Which call a listener is told about."""

    call: ToolCall
    source: Source


class LifecycleListener(Protocol):
    """Watches calls. Its time is bounded once an outcome is claimed; its errors are logged and change nothing."""

    async def on_tool_start(self, event: LifecycleEvent, /) -> None:
        """The call is admitted."""
        ...

    async def on_tool_finish(self, event: LifecycleEvent, outcome: Outcome, /) -> None:
        """The call has its outcome. Comes exactly once, without a start if it was aborted before it was admitted."""
        ...


@attrs.frozen
class Continue:
    """A hook's answer: as it is."""


@attrs.frozen
class Rewrite:
    """A hook's answer before the handler: with this input instead."""

    payload: object


@attrs.frozen
class Feedback:
    """A hook's answer after the handler: the model reads this instead; the typed result stays."""

    text: str


@attrs.frozen
class Block:
    """A hook's answer: not at all, and the model reads why."""

    reason: str | None = None


PreDecision: TypeAlias = Continue | Rewrite | Block
PostDecision: TypeAlias = Continue | Feedback | Block


class Hooks(Protocol):
    """Checks calls. What it raises ends the call as an error of the rollout."""

    async def pre_tool_use(self, invocation: Invocation, payload: object, /) -> PreDecision:
        """Before the handler."""
        ...

    async def post_tool_use(self, invocation: Invocation, payload: object, output: ToolOutput, /) -> PostDecision:
        """After a handler that succeeded."""
        ...
