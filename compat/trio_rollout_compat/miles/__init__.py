"""The engine as miles's rollout function: ``--rollout-function-path trio_rollout_compat.miles.TrioRolloutFn``.

miles came from slime: samples, rewards, evaluation and the engine are those of ``trio_rollout_compat.slime``. ``_rollout`` has what
differs: the class, the weight version that comes with each call, and the calls of generate functions. miles itself is
imported when it calls, never before; its types are used as found.
"""

from ..slime import close_engines
from ._rollout import TrioRolloutFn

__all__ = ["TrioRolloutFn", "close_engines"]
