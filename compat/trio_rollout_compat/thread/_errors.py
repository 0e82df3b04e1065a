"""What only an engine on another thread can go through. A closed or crashed one raises ``trio_rollout.errors.EngineClosed``."""

from trio_rollout.errors import RolloutError


class EngineForked(RolloutError):
    """The engine belongs to the parent process: threads do not survive a fork. Open one of its own in the child."""


class EngineStuck(RolloutError, TimeoutError):
    """The engine's thread did not answer in time: something on it blocks. The message shows where."""
