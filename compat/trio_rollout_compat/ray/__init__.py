"""The engine on many nodes of a Ray cluster: one engine a node, one lease service that owns source and ledger.

Read ``_leasing`` first, then ``_actors`` (service and nodes as Ray actors), ``_rollouts`` (what the trainer holds), ``_open``. Needs
the extra ``ray``.
"""

from .._leasing._node import NodeParts as NodeParts
from ._rollouts import RayBatch as RayBatch
from ._rollouts import RayRollouts as RayRollouts
from ._rollouts import open_ray_rollouts as open_ray_rollouts

__all__ = ["NodeParts", "RayBatch", "RayRollouts", "open_ray_rollouts"]
