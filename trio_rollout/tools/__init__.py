"""What a rollout may run: captured commands, exec sessions, tool dispatch, sandboxes. Linux only.

Five different stops live here, and each result says which one it met: a cancelled *turn*, the *expiry* of a captured
command, the *yield* of a session, an *interrupt*, and a *denial*.
"""

from .._core.enums import Leftovers
from ._capture import Captured, CapturePolicy, run_captured
from ._errors import CommandSignalled, CommandTimeout, SpawnError, SupervisorLost
from ._expiration import StopKind
from ._limits import ExecLimits, OnTurnCancel

__all__ = [
    "CapturePolicy",
    "Captured",
    "CommandSignalled",
    "CommandTimeout",
    "ExecLimits",
    "Leftovers",
    "OnTurnCancel",
    "SpawnError",
    "StopKind",
    "SupervisorLost",
    "run_captured",
]
