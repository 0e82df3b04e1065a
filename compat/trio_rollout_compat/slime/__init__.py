"""The engine as slime's rollout function: ``--rollout-function-path trio_rollout_compat.slime.generate_rollout``.

Read in this order: ``_engine`` (what slime calls, and the engine that lives between the calls), ``_adapters`` (slime's
data source and functions as the engine's), ``_samples`` (its ``Sample`` and the engine's values), ``_evaluation``,
``_arguments`` (every flag that is read). slime itself is imported when it calls, never before; its types are used as found.
"""

from ._arguments import add_arguments
from ._engine import close_engines, generate_rollout

__all__ = ["add_arguments", "close_engines", "generate_rollout"]
