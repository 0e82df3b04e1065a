"""What a rollout may run: captured commands, exec sessions, tool dispatch, sandboxes. Linux only.

Five different stops live here, and each result says which one it met: a cancelled *turn*, the *expiry* of a captured
command, the *yield* of a session, an *interrupt*, and a *denial*.
"""

from .._core.enums import Leftovers
from ._commands.capture import CapturePolicy, run_captured
from ._commands.captured import Captured
from ._commands.child import ExitStatus
from ._commands.command import MINIMAL_ENVIRONMENT, Command
from ._commands.expiration import StopKind
from ._dispatch.dispatch import ToolRuntime
from ._dispatch.exec_tools import ExecCommandTool, ShellTool, WriteStdinTool
from ._dispatch.tool import (
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
from ._dispatch.turn import TurnCancellation
from ._dispatch.values import (
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
from ._errors import CommandSignalled, CommandTimeout, SpawnError, SupervisorLost
from ._exec.pause import PauseState
from ._exec.sessions import ExecSessions, open_exec_sessions
from ._exec.values import (
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
from ._limits import ExecLimits, OnTurnCancel
from ._network.policy import AllowedHosts, DenialHandle, NetworkGrant, NetworkPolicy, ProxyPolicy, open_proxy_policy
from ._rollout_tools import RolloutTools, new_rollout_tools, open_rollout_tools
from ._sandboxes.local import LocalSandboxes
from ._sandboxes.provider import NeverRan, SandboxBackend, SandboxCounts, SandboxProvider, SandboxSettings, SandboxSpec
from ._sandboxes.sandbox import Sandbox, open_sandbox

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
