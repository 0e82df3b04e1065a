"""What a rollout may run: captured commands, exec sessions, tool dispatch, sandboxes. Linux only.

Five different stops live here, and each result says which one it met: a cancelled *turn*, the *expiry* of a captured
command, the *yield* of a session, an *interrupt*, and a *denial*.
"""

from .._core.enums import Leftovers
from ._capture import Captured, CapturePolicy, run_captured
from ._errors import CommandSignalled, CommandTimeout, SpawnError, SupervisorLost
from ._expiration import StopKind
from ._limits import ExecLimits, OnTurnCancel
from ._rollout_tools import RolloutTools, open_rollout_tools

__all__ = [
    "CapturePolicy",
    "Captured",
    "CommandSignalled",
    "CommandTimeout",
    "ExecLimits",
    "Leftovers",
    "OnTurnCancel",
    "RolloutTools",
    "SpawnError",
    "StopKind",
    "SupervisorLost",
    "open_rollout_tools",
    "run_captured",
]
