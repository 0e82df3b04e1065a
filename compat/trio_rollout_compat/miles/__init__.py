"""The engine as miles's rollout function: ``--rollout-function-path trio_rollout_compat.miles.TrioRolloutFn``.

miles came from slime: samples, rewards, evaluation and the engine's life are those of ``trio_rollout_compat.slime``. Its own are
the class (``_rollout``), the weight version that comes with each call, and how generate functions are called (``_plugins``).
miles itself is imported when it calls, never before; its types are used as found.
"""

from ..slime import close_engines as close_engines
from ._rollout import TrioRolloutFn as TrioRolloutFn

__all__ = ["TrioRolloutFn", "close_engines"]
