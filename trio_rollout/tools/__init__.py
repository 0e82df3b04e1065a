"""Tools that a rollout may run: captured commands, exec sessions, tool dispatch, sandboxes. Linux only.

There are five different stops, and each result says which one it met: a *turn cancellation*, the *expiry* of a captured
command, the *yield deadline* of an exec session, an *interrupt*, and a *denial*.
"""

from ._commands.capture import Captured, StopKind, run_captured
from ._commands.command import SpawnError, SupervisorLost
from ._dispatch.dispatch import ToolRuntime
from ._dispatch.exec_tools import ExecCommandTool, ShellTool, WriteStdinTool
from ._dispatch.tool import (
    AbortedOutput,
    Block,
    CallTiming,
    Continue,
    Feedback,
    FunctionOutput,
    Hooks,
    Invocation,
    LifecycleListener,
    RespondToModel,
    Rewrite,
    Tool,
    ToolCall,
    ToolName,
    ToolOutcome,
    ToolOutput,
    ToolResult,
    TurnCancellation,
)
from ._exec.sessions import ExecSessions
from ._exec.values import (
    ExecError,
    ExecOutput,
    ExecSessionEnd,
    ExecSessionsClosed,
    ProcessFailed,
    StdinClosed,
    UnknownProcessId,
)
from ._limits import ExecLimits
from ._network import NetworkGrant, NetworkPolicy, open_proxy_policy
from ._rollout_tools import RolloutTools, open_rollout_tools
from ._sandboxes.local import LocalSandboxes
from ._sandboxes.provider import (
    NeverRan,
    SandboxBackend,
    SandboxCounts,
    SandboxProvider,
    SandboxSettings,
    SandboxSpec,
)
from ._sandboxes.sandbox import Sandbox

__all__ = [
    "AbortedOutput",
    "Block",
    "CallTiming",
    "Captured",
    "Continue",
    "ExecCommandTool",
    "ExecError",
    "ExecLimits",
    "ExecOutput",
    "ExecSessionEnd",
    "ExecSessions",
    "ExecSessionsClosed",
    "Feedback",
    "FunctionOutput",
    "Hooks",
    "Invocation",
    "LifecycleListener",
    "LocalSandboxes",
    "NetworkGrant",
    "NetworkPolicy",
    "NeverRan",
    "ProcessFailed",
    "RespondToModel",
    "Rewrite",
    "RolloutTools",
    "Sandbox",
    "SandboxBackend",
    "SandboxCounts",
    "SandboxProvider",
    "SandboxSettings",
    "SandboxSpec",
    "ShellTool",
    "SpawnError",
    "StdinClosed",
    "StopKind",
    "SupervisorLost",
    "Tool",
    "ToolCall",
    "ToolName",
    "ToolOutcome",
    "ToolOutput",
    "ToolResult",
    "ToolRuntime",
    "TurnCancellation",
    "UnknownProcessId",
    "WriteStdinTool",
    "open_proxy_policy",
    "open_rollout_tools",
    "run_captured",
]
