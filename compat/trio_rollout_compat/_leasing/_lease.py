"""What travels between the lease service and a node: a lease, and how it was settled."""

import attrs

from trio_rollout._core.values import Failure, Prompt, Trajectory


@attrs.frozen(kw_only=True)
class Lease:
    """A group that a node is to run. ``holder`` is the life of the service that lent it; ``number`` is unique within that."""

    holder: str
    number: int
    prompt: Prompt

    def __str__(self) -> str:
        return f"lease {self.number} of group {self.prompt.group_id}"


@attrs.frozen(kw_only=True)
class Settled:
    """A lease's end on its node: the group's trajectories, or why there are none."""

    rows: tuple[Trajectory, ...] = ()
    failure: Failure | None = None
