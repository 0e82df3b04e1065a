"""The rollout engine: the nesting of scopes from the pool to one turn, and what surrounds it."""

from ._engine import Batches, RolloutEngine, open_rollout_engine

__all__ = ["Batches", "RolloutEngine", "open_rollout_engine"]
