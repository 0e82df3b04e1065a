"""The values of tool dispatch: names, calls, outputs, outcomes, times."""

import enum
from typing import Protocol, TypeAlias

import attrs


@attrs.frozen
class ToolName:
    """A tool's canonical name; those of the model's own tool server are in the default namespace."""

    name: str
    namespace: str | None = None

    @property
    def is_default_namespace(self) -> bool:
        """Whether it has no namespace of its own."""
        return self.namespace is None

    def __str__(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"


@attrs.frozen(kw_only=True)
class ToolCall:
    """What the model asked for. ``call_id`` is the model's; it gets exactly one result."""

    call_id: str
    name: ToolName
    payload: object = attrs.field(factory=dict)


class Source(enum.Enum):
    """Who called a tool."""

    DIRECT = "direct"
    """The model, in its turn."""
    CODE_MODE = "code_mode"
    """A tool that runs the model's code; its own call's timing covers this one."""


class ToolOutput(Protocol):
    """What a tool gives back."""

    @property
    def success(self) -> bool | None:
        """What the model's protocol is told; None: it is told nothing."""
        ...

    @property
    def success_for_logging(self) -> bool:
        """Whether hooks and telemetry count it as a success. Not a command's exit status."""
        ...

    def model_text(self) -> str:
        """What the model reads."""
        ...

    def log_preview(self) -> str:
        """A short form for logs."""
        ...


@attrs.frozen(kw_only=True)
class FunctionOutput:
    """A text, and whether the tool calls it a success."""

    text: str
    success: bool | None = None

    @property
    def success_for_logging(self) -> bool:
        """The declared success, by default true."""
        return self.success is not False

    def model_text(self) -> str:
        """The text."""
        return self.text

    def log_preview(self) -> str:
        """Its beginning."""
        return self.text[:200]


@attrs.frozen(kw_only=True)
class FeedbackOutput:
    """A result whose text a hook has replaced; the typed result is kept."""

    result: ToolOutput
    text: str

    @property
    def success(self) -> bool | None:
        """The result's."""
        return self.result.success

    @property
    def success_for_logging(self) -> bool:
        """The result's."""
        return self.result.success_for_logging

    def model_text(self) -> str:
        """The hook's text."""
        return self.text

    def log_preview(self) -> str:
        """The result's."""
        return self.result.log_preview()


@attrs.frozen(kw_only=True)
class AbortedOutput:
    """The synthetic result of a call that a cancelled turn stopped. Says nothing about whether a process died."""

    text: str
    success: None = None

    @property
    def success_for_logging(self) -> bool:
        """Never."""
        return False

    def model_text(self) -> str:
        """The text."""
        return self.text

    def log_preview(self) -> str:
        """The text."""
        return self.text


def abort_text(name: ToolName, seconds: float) -> str:
    """What the model reads about a call that was aborted ``seconds`` after it was made."""
    shown = max(0.1, seconds)
    if name.is_default_namespace and name.name == "exec_command":
        return f"Wall time: {shown:.1f} seconds\naborted by user"
    return f"aborted by user after {shown:.1f}s"


@attrs.frozen(kw_only=True)
class Completed:
    """The handler returned; ``success`` as its output says. Describes the handler, whatever a hook made of it."""

    success: bool


@attrs.frozen(kw_only=True)
class Failed:
    """An error, before or in the handler."""

    handler_executed: bool


@attrs.frozen
class Blocked:
    """A hook refused the call; the handler never started."""


@attrs.frozen
class Aborted:
    """The turn, or the scope around the call, was cancelled."""


Outcome: TypeAlias = Completed | Failed | Blocked | Aborted


@attrs.frozen(kw_only=True)
class CallTiming:
    """Seconds of one call: ``dispatch`` until it was admitted (all of it, if it never was), ``handler`` from then on."""

    execution_started: bool
    dispatch: float
    handler: float
    total: float


@attrs.frozen(kw_only=True)
class ToolResult:
    """The one result of a call.

    ``outcome`` is None for a tool that does not exist: nobody was told of a start or an end. ``lost`` is what a finished
    handler had returned when the call was aborted in the hook after it: kept for the record, the model does not see it.
    """

    call_id: str
    output: ToolOutput
    outcome: Outcome | None
    timing: CallTiming
    lost: ToolOutput | None = None
