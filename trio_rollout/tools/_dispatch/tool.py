"""A tool and the values of its calls; and the seams of dispatch: turn cancellation, listeners, hooks."""

import abc
import enum
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeAlias, final

import attrs
import trio

from ..._core.arrays import brief
from ...errors import RolloutError, ToolError


@final
@attrs.define(eq=False)
class TurnCancellation:
    """The cancellation of one turn. ``ExecLimits.on_turn_cancel`` says if the processes of exec sessions die with it."""

    reason: str | None = attrs.field(default=None, init=False)
    cancelled_at: float | None = attrs.field(default=None, init=False)
    _event: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _scopes: list[trio.CancelScope] = attrs.field(factory=list, init=False, repr=False)

    @property
    def cancelled(self) -> bool:
        """True once the turn is cancelled."""
        return self._event.is_set()

    def cancel(self, reason: str | None = None) -> None:
        """Cancel the turn's tool calls. The first reason stays; later calls change nothing."""
        if self.cancelled:
            return
        self.reason = reason
        self.cancelled_at = trio.current_time()
        self._event.set()
        for scope in self._scopes:
            scope.cancel(reason or "the turn was cancelled")

    async def wait(self) -> None:
        """Wait until the turn is cancelled."""
        await self._event.wait()

    @contextmanager
    def link(self, scope: trio.CancelScope) -> Generator[None]:
        """Let the turn's cancellation cancel ``scope`` for the length of a block; at once, if the turn is cancelled already."""
        self._scopes.append(scope)
        if self.cancelled:
            scope.cancel(self.reason or "the turn was cancelled")
        try:
            yield
        finally:
            self._scopes.remove(scope)


@attrs.frozen
class ToolName:
    """A tool's canonical name. Tools of the model's own tool server are in the default namespace."""

    name: str
    namespace: str | None = None

    @property
    def is_default_namespace(self) -> bool:
        """True for a name without a namespace."""
        return self.namespace is None

    def __str__(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"


@attrs.frozen(kw_only=True)
class ToolCall:
    """A model's tool call. ``call_id`` is the model's; each id gets exactly one result."""

    call_id: str
    name: ToolName
    payload: object = attrs.field(factory=dict)


class ToolOutput(Protocol):
    """The output of a tool."""

    @property
    def success(self) -> bool | None:
        """The success that the model's protocol reports; None: the protocol reports none."""
        ...

    @property
    def success_for_logging(self) -> bool:
        """The success that hooks and outcomes use. Not a command's exit status."""
        ...

    def model_text(self) -> str:
        """Return the text for the model."""
        ...


@attrs.frozen(kw_only=True)
class FunctionOutput:
    """A text, and the success that the tool declares."""

    text: str = attrs.field(repr=brief)
    success: bool | None = None

    @property
    def success_for_logging(self) -> bool:
        """The declared success, by default True."""
        return self.success is not False

    def model_text(self) -> str:
        """Return the text."""
        return self.text


@attrs.frozen(kw_only=True)
class FeedbackOutput:
    """A ``ToolOutput`` whose text a hook has replaced; the typed result is kept."""

    result: ToolOutput
    text: str = attrs.field(repr=brief)

    @property
    def success(self) -> bool | None:
        return self.result.success

    @property
    def success_for_logging(self) -> bool:
        return self.result.success_for_logging

    def model_text(self) -> str:
        return self.text


@attrs.frozen(kw_only=True)
class AbortedOutput:
    """The synthetic output of a tool call that a turn cancellation stopped. Does not say if a process died."""

    text: str = attrs.field(repr=brief)
    success: None = None

    @property
    def success_for_logging(self) -> bool:
        """Always False."""
        return False

    def model_text(self) -> str:
        """Return the text."""
        return self.text


def abort_text(name: ToolName, seconds: float) -> str:
    """Return the model's text about a tool call that was aborted ``seconds`` after it was made."""
    shown = max(0.1, seconds)
    if name.is_default_namespace and name.name == "exec_command":
        return f"Wall time: {shown:.1f} seconds\naborted by user"
    return f"aborted by user after {shown:.1f}s"


class ToolOutcome(enum.Enum):
    """The end of a tool call. Describes the handler, whatever a hook made of its result."""

    COMPLETED = "completed"
    """The handler returned a success."""
    UNSUCCESSFUL = "unsuccessful"
    """The handler returned, and its output declares a failure."""
    FAILED = "failed"
    """The handler raised an error."""
    FAILED_BEFORE = "failed_before"
    """An error came before the handler ran."""
    BLOCKED = "blocked"
    """A hook refused the call; the handler did not run."""
    ABORTED = "aborted"
    """The turn, or the scope around the call, was cancelled."""


def outcome_of(output: ToolOutput) -> ToolOutcome:
    """Return the outcome of a handler that returned ``output``."""
    return ToolOutcome.COMPLETED if output.success_for_logging else ToolOutcome.UNSUCCESSFUL


@attrs.frozen(kw_only=True)
class CallTiming:
    """Seconds of one tool call: ``dispatch`` until its admission (all of the time, without one), ``handler`` from then on."""

    execution_started: bool
    dispatch: float
    handler: float
    total: float


@attrs.frozen(kw_only=True)
class ToolResult:
    """The one result of a tool call.

    ``outcome`` is None for a tool that does not exist: listeners heard neither a start nor an end. ``lost`` is the output of a
    finished handler whose call was aborted in the hook that follows: kept for the record, the model does not see it.
    """

    call_id: str
    output: ToolOutput
    outcome: ToolOutcome | None
    timing: CallTiming
    lost: ToolOutput | None = None


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
