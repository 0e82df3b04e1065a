"""The interesting states: a sweep that never met one of them has proved nothing about it."""

from trio_rollout import Cause, PauseMode

from .faults import ALL

SEEN = "seeds saw"
POINTS = "cancel points"
REQUIRED = (
    *(f"requeued: {cause.value}" for cause in Cause if cause is not Cause.SIBLING),  # never a whole group's cause
    *(f"window: {mode.value}" for mode in PauseMode),
    *(name for name in ALL if not name.startswith("host:")),
    "killed",
    "power off",
    "partition",
    "reset",
    "partial send",
    "late answer",
    "orphan",
    "full buffer",
    "slow consumer",
    "a turn was put together from parts",
    "next_batch was cancelled",
    "cancelled from outside",
    "drained",
    "evaluated",
    "failure budget",
    "filtered",
    "quarantined",
    "returned",
    "window failed",
)
