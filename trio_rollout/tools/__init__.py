"""What a rollout may run: captured commands, exec sessions, tool dispatch, sandboxes. Linux only.

Five different stops live here, and each result says which one it met: a cancelled *turn*, the *expiry* of a captured
command, the *yield* of a session, an *interrupt*, and a *denial*.
"""

from .._core.enums import Leftovers
from ._capture import Captured, CapturePolicy, run_captured
from ._dispatch import ToolRuntime
from ._errors import CommandSignalled, CommandTimeout, SpawnError, SupervisorLost
from ._expiration import StopKind
from ._limits import ExecLimits, OnTurnCancel
from ._rollout_tools import RolloutTools, open_rollout_tools
from ._tool import (
    Block,
    Continue,
    FatalToolError,
    Feedback,
    Hooks,
    Invocation,
    LifecycleEvent,
    LifecycleListener,
    RespondToModel,
    Rewrite,
    Tool,
    ToolRegistry,
)
from ._tool_values import (
    Aborted,
    AbortedOutput,
    Blocked,
    CallTiming,
    Completed,
    Failed,
    FunctionOutput,
    Outcome,
    Source,
    ToolCall,
    ToolName,
    ToolOutput,
    ToolResult,
    abort_text,
)
from ._turn import TurnCancellation

__all__ = [
    "Aborted",
    "AbortedOutput",
    "Block",
    "Blocked",
    "CallTiming",
    "CapturePolicy",
    "Captured",
    "CommandSignalled",
    "CommandTimeout",
    "Completed",
    "Continue",
    "ExecLimits",
    "Failed",
    "FatalToolError",
    "Feedback",
    "FunctionOutput",
    "Hooks",
    "Invocation",
    "Leftovers",
    "LifecycleEvent",
    "LifecycleListener",
    "OnTurnCancel",
    "Outcome",
    "RespondToModel",
    "Rewrite",
    "RolloutTools",
    "Source",
    "SpawnError",
    "StopKind",
    "SupervisorLost",
    "Tool",
    "ToolCall",
    "ToolName",
    "ToolOutput",
    "ToolRegistry",
    "ToolResult",
    "ToolRuntime",
    "TurnCancellation",
    "abort_text",
    "open_rollout_tools",
    "run_captured",
]
