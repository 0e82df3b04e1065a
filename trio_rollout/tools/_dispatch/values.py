"""The values of tool dispatch: names, tool calls, outputs, outcomes, times."""

import enum
from typing import Protocol

import attrs


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

    text: str
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
    """A result whose text a hook has replaced; the typed result is kept."""

    result: ToolOutput
    text: str

    @property
    def success(self) -> bool | None:
        """The result's success."""
        return self.result.success

    @property
    def success_for_logging(self) -> bool:
        """The result's success for logging."""
        return self.result.success_for_logging

    def model_text(self) -> str:
        """Return the hook's text."""
        return self.text


@attrs.frozen(kw_only=True)
class AbortedOutput:
    """The synthetic output of a tool call that a turn cancellation stopped. Does not say if a process died."""

    text: str
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
