"""The engine as slime's rollout function: ``--rollout-function-path trio_rollout_compat.slime.generate_rollout``.

Read in this order: ``_rollout`` (what slime calls), ``_life`` (the engine it runs in), ``_source``, ``_generate``, ``_rewards`` (slime's
plug-ins as the engine's), ``_samples`` (its ``Sample`` and our values), ``_arguments`` (every flag that is read). slime itself is
imported when it calls, never before; its types are used as found.
"""

from ._rollout import close_engines as close_engines
from ._rollout import generate_rollout as generate_rollout

__all__ = ["close_engines", "generate_rollout"]
