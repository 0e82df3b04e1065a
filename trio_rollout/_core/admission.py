"""Who may start: pure decisions over slots, waiting groups and the ready buffer.

How old a group may be: pure decisions over versions and counts.

Both policies look back: a group that is too old when the trainer would get it is thrown away, and runs again. Pace looks ahead
too, so that there is none: with ``per_version`` groups consumed a version, no more than ``(max_versions + 1) * per_version``
groups may be under way at once, or the last of them would be consumed too late. Only a trainer that makes several versions of one
batch, or skips some, is faster than it can look. A consumer that waits is never starved by it.
"""

import attrs

from .settings import Pace, Staleness


@attrs.frozen(kw_only=True)
class Load:
    """What admission looks at. Slots are counted in rollouts, everything else in groups.

    ``eligible``: waiting groups whose backoff is over. ``finished``: ready ones and those whose rollouts are all over.
    ``bound``: how many may be finished before admission stops. ``fresh_room``: how many more may start without becoming
    too old; None: any number. ``resting``: requeued groups whose backoff is not over; while as many rest as ``most_resting``,
    no prompt is pulled in their place, or an outage would read the source empty. ``ahead``: how many prompts to have at hand,
    so that a free slot never waits for the source.
    """

    open: bool
    free_slots: int
    per_group: int
    eligible: int
    finished: int
    bound: int
    exhausted: bool = False
    fresh_room: int | None = None
    ahead: int = 0
    resting: int = 0
    most_resting: int = 1


def startable(load: Load) -> int:
    """How many waiting groups may start now: whole groups only, none while the buffer is full or the gate is closed."""
    return min(load.eligible, _room(load))


# Asked whenever a rollout ends, and seven times of eight no whole group fits: then these say so before there is a Load.
def may_start(*, free_slots: int, per_group: int) -> bool:
    """Whether ``startable`` can be above 0 at all."""
    return free_slots >= per_group


def may_pull(*, free_slots: int, per_group: int, eligible: int, ahead: int) -> bool:
    """Whether ``pullable`` can be above 0 at all."""
    return eligible < free_slots // per_group + ahead


def pullable(load: Load) -> int:
    """How many prompts to take from the source: what could start at once behind everything that waits, and a few ahead."""
    if load.exhausted or not load.open or load.resting >= load.most_resting:
        return 0
    return max(0, _room(load) + load.ahead - load.eligible)


def _room(load: Load) -> int:
    if not load.open or load.finished >= load.bound:
        return 0
    whole = load.free_slots // load.per_group
    return whole if load.fresh_room is None else min(whole, load.fresh_room)


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
