"""The engine as slime's rollout function: ``--rollout-function-path trio_rollout_compat.slime.generate_rollout``.

Read in this order: ``_rollout`` (what slime calls), ``_engine`` (the engine that lives between the calls), ``_source``, ``_adapters`` and
``_plugins`` (slime's functions as the engine's), ``_samples`` (its ``Sample`` and the engine's values), ``_evaluation``,
``_arguments`` (every flag that is read). slime itself is imported when it calls, never before; its types are used as found.
"""

from ._arguments import add_arguments
from ._rollout import close_engines, generate_rollout

__all__ = ["add_arguments", "close_engines", "generate_rollout"]
