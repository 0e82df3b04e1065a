"""What a rollout may run: captured commands, exec sessions, tool dispatch, sandboxes. Linux only.

Five different stops live here, and each result says which one it met: a cancelled *turn*, the *expiry* of a captured
command, the *yield* of a session, an *interrupt*, and a *denial*.
"""

from .._core.enums import Leftovers
from ._capture import CapturePolicy, run_captured
from ._captured import Captured
from ._child import ExitStatus
from ._command import MINIMAL_ENVIRONMENT, Command
from ._denial import DenialHandle
from ._dispatch import ToolRuntime
from ._errors import CommandSignalled, CommandTimeout, SpawnError, SupervisorLost
from ._exec_tools import ExecCommandTool, ShellTool, WriteStdinTool
from ._expiration import StopKind
from ._limits import ExecLimits, OnTurnCancel
from ._local_sandbox import LocalSandboxes
from ._network import AllowedHosts, NetworkGrant, NetworkPolicy, ProxyPolicy, open_proxy_policy
from ._pause import PauseState
from ._rollout_tools import RolloutTools, new_rollout_tools, open_rollout_tools
from ._sandbox import Sandbox, open_sandbox
from ._sandbox_provider import NeverRan, SandboxBackend, SandboxCounts, SandboxProvider, SandboxSettings, SandboxSpec
from ._session_values import (
    CommandBegin,
    CommandEnd,
    CreateProcessError,
    ExecError,
    ExecOutput,
    ExecSessionsClosed,
    ExecStatistics,
    OutputDelta,
    ProcessFailed,
    ProcessInfo,
    SessionEvent,
    SessionListener,
    StdinClosed,
    TerminalInteraction,
    UnknownProcessId,
    WriteToStdinError,
)
from ._sessions import ExecSessions, open_exec_sessions
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
    "MINIMAL_ENVIRONMENT",
    "Aborted",
    "AbortedOutput",
    "AllowedHosts",
    "Block",
    "Blocked",
    "CallTiming",
    "CapturePolicy",
    "Captured",
    "Command",
    "CommandBegin",
    "CommandEnd",
    "CommandSignalled",
    "CommandTimeout",
    "Completed",
    "Continue",
    "CreateProcessError",
    "DenialHandle",
    "ExecCommandTool",
    "ExecError",
    "ExecLimits",
    "ExecOutput",
    "ExecSessions",
    "ExecSessionsClosed",
    "ExecStatistics",
    "ExitStatus",
    "Failed",
    "FatalToolError",
    "Feedback",
    "FunctionOutput",
    "Hooks",
    "Invocation",
    "Leftovers",
    "LifecycleEvent",
    "LifecycleListener",
    "LocalSandboxes",
    "NetworkGrant",
    "NetworkPolicy",
    "NeverRan",
    "OnTurnCancel",
    "Outcome",
    "OutputDelta",
    "PauseState",
    "ProcessFailed",
    "ProcessInfo",
    "ProxyPolicy",
    "RespondToModel",
    "Rewrite",
    "RolloutTools",
    "Sandbox",
    "SandboxBackend",
    "SandboxCounts",
    "SandboxProvider",
    "SandboxSettings",
    "SandboxSpec",
    "SessionEvent",
    "SessionListener",
    "ShellTool",
    "Source",
    "SpawnError",
    "StdinClosed",
    "StopKind",
    "SupervisorLost",
    "TerminalInteraction",
    "Tool",
    "ToolCall",
    "ToolName",
    "ToolOutput",
    "ToolRegistry",
    "ToolResult",
    "ToolRuntime",
    "TurnCancellation",
    "UnknownProcessId",
    "WriteStdinTool",
    "WriteToStdinError",
    "abort_text",
    "new_rollout_tools",
    "open_exec_sessions",
    "open_proxy_policy",
    "open_rollout_tools",
    "open_sandbox",
    "run_captured",
]
