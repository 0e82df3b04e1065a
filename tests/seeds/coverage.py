"""The interesting states: a sweep that never met one of them has proved nothing about it."""

from trio_rollout import Cause, PauseMode

from .faults import ALL

SEEN = "seeds saw"
POINTS = "cancel points"
NEVER_A_SAMPLES = {Cause.SIBLING, Cause.CANCELLED, Cause.SHUTDOWN}
"""The causes that end an attempt, or stand for a sibling's failure: no sample alone is tried again for them."""
REQUIRED = (
    *(f"requeued: {cause.value}" for cause in (Cause.DEADLINE, Cause.STALE, Cause.CANCELLED, Cause.SHUTDOWN)),
    *(f"tried again: {cause.value}" for cause in Cause if cause not in NEVER_A_SAMPLES),
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
    "turns were given back",
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
