"""How old a group may be: pure decisions over versions and counts.

Both policies look back: a group that is too old when the trainer would get it is thrown away, and runs again. Pace looks ahead
too, so that there is none: with ``per_version`` groups consumed a version, no more than ``(max_versions + 1) * per_version``
groups may be under way at once, or the last of them would be consumed too late. Only a trainer that makes several versions of one
batch, or skips some, is faster than it can look. A consumer that waits is never starved by it.
"""

import attrs

from .settings import Pace, Staleness


def is_too_old(oldest: int | None, newest: int, staleness: Staleness) -> bool:
    """Whether a group whose oldest token is of version ``oldest`` exceeds the bound at version ``newest``."""
    return staleness.max_versions is not None and oldest is not None and newest - oldest > staleness.max_versions


def paces(staleness: Staleness) -> bool:
    """Whether admission keeps groups from becoming too old."""
    return staleness.max_versions is not None and isinstance(staleness.policy, Pace)


def is_due(begun: int | None, newest: int, staleness: Staleness) -> bool:
    """Whether a running group must be in the next batch, because one version later it would be too old."""
    return paces(staleness) and begun is not None and newest - begun == staleness.max_versions


@attrs.frozen(kw_only=True)
class Flow:
    """Groups as pacing sees them. ``under_way``: running and finished; ``delivered``: since the newest version."""

    per_version: int
    under_way: int
    delivered: int
    wanted: int


def pace_room(flow: Flow, staleness: Staleness) -> int | None:
    """How many more groups may be started; None: any number.

    What a waiting consumer wants may always be started: it is consumed at once, under the version it began with.
    """
    if not paces(staleness) or staleness.max_versions is None:
        return None
    ahead = (staleness.max_versions + 1) * flow.per_version - flow.delivered - flow.under_way
    return max(ahead, flow.wanted - flow.under_way, 0)
