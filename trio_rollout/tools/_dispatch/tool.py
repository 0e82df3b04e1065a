"""The seams of dispatch: a tool, the listeners that watch its calls, and the hooks that check them."""

import abc
from collections.abc import Mapping
from typing import Protocol, TypeAlias

import attrs
import trio

from ...errors import RolloutError, ToolError
from .turn import TurnCancellation
from .values import ToolCall, ToolName, ToolOutcome, ToolOutput


class RespondToModel(RolloutError):
    """An error for the model to read, as the tool's answer. Not a failure of the rollout."""


@attrs.frozen(kw_only=True)
class Invocation:
    """The argument of a handler: the tool call, its payload after the hooks, and its turn's cancellation.

    ``turn`` is for handlers that watch it; it cancels the handler's scope in any case.
    """

    call: ToolCall
    payload: object
    turn: TurnCancellation

    @property
    def call_id(self) -> str:
        """The model's id of this tool call."""
        return self.call.call_id

    def arguments(self) -> Mapping[str, object]:
        """Return the payload of a function call.

        Raises:
          ToolError: the payload is no object.

        """
        if not isinstance(self.payload, Mapping):
            raise ToolError(f"tool {self.call.name}: arguments are {type(self.payload).__name__}, not an object")
        return self.payload


class Tool(Protocol):
    """A tool that a model can call. Stateless, or with state that outlives its calls."""

    name: ToolName
    supports_parallel: bool = False
    """True if the tool may run beside other tools that allow it too."""

    def accepts(self, payload: object) -> bool:
        """Return True if the tool takes this kind of payload."""
        return isinstance(payload, Mapping)

    async def wait_until_ready(self) -> None:
        """Wait until the tool can be called. Runs outside the gate, so that a slow start holds up no other tool."""
        await trio.lowlevel.checkpoint()

    @abc.abstractmethod
    async def handle(self, invocation: Invocation) -> ToolOutput:
        """Execute the call. Cancelled when the turn is.

        Raises:
          RespondToModel: the model should read this.
          ToolError: infrastructure failed; ends the rollout.

        """

    def pre_hook_payload(self, invocation: Invocation) -> object | None:
        """Return the payload that a hook checks before the handler; None: no check."""
        return invocation.payload

    def with_updated_input(self, payload: object, rewritten: object) -> object:
        """Return the payload after a hook has rewritten the part that it checked.

        Raises:
          RespondToModel: the tool can't take the rewritten part.

        """
        del payload
        return rewritten

    def post_hook_payload(self, output: ToolOutput) -> object | None:
        """Return the payload that a hook checks after the handler; None: no check."""
        return output.model_text()


class LifecycleListener(Protocol):
    """Watches tool calls. Its time is bounded once an outcome is claimed; its errors are logged and change nothing."""

    async def on_tool_start(self, call: ToolCall, /) -> None:
        """Called when the tool call is admitted."""
        ...

    async def on_tool_finish(self, call: ToolCall, outcome: ToolOutcome, /) -> None:
        """Called exactly once, with the outcome; without a start before, if the call was aborted before its admission."""
        ...


@attrs.frozen
class Continue:
    """A hook's decision: go on unchanged."""


@attrs.frozen
class Rewrite:
    """A hook's decision before the handler: go on with this input."""

    payload: object


@attrs.frozen
class Feedback:
    """A hook's decision after the handler: the model reads this text; the typed result stays."""

    text: str


@attrs.frozen
class Block:
    """A hook's decision: stop, and the model reads the reason."""

    reason: str | None = None


PreDecision: TypeAlias = Continue | Rewrite | Block
PostDecision: TypeAlias = Continue | Feedback | Block


class Hooks(Protocol):
    """Checks tool calls. An error that a hook raises ends the call as an error of the rollout."""

    async def pre_tool_use(self, invocation: Invocation, payload: object, /) -> PreDecision:
        """Decide before the handler."""
        ...

    async def post_tool_use(self, invocation: Invocation, payload: object, output: ToolOutput, /) -> PostDecision:
        """Decide after a handler that succeeded."""
        ...
