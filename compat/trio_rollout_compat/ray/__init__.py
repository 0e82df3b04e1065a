"""The engine on many nodes of a Ray cluster: one engine a node, one lease service that owns source and ledger.

Read ``trio_rollout_compat._leasing`` first, then ``_actors`` (service and nodes as Ray actors) and ``_rollouts`` (the trainer's side, and
how the actors are started). Needs the extra ``ray``. Decision: docs/decisions/0017-a-cluster-is-an-engine-that-lends.md.
"""

from .._leasing._node import NodeParts
from ._rollouts import RayBatch, RayRollouts, open_ray_rollouts

__all__ = ["NodeParts", "RayBatch", "RayRollouts", "open_ray_rollouts"]
