"""Admission: the groups that may start. Pure decisions over slots, waiting groups, the ready buffer and staleness.

**Staleness** (docs/decisions/0028-pacing-keeps-the-bound.md). Both policies look back: a group that is too old when the trainer would get it is thrown
away, and runs again. ``Pace`` looks ahead as well, so that there is no such group: if a version consumes ``per_version``
groups, no more than ``(max_versions + 1) * per_version`` may be under way at once, or the last of them would be consumed too
late. A trainer that makes several versions of one batch, or skips some, is faster than ``Pace`` can foresee. A consumer that
waits is never starved by pacing: what it asked for may always be started.
"""

from collections.abc import Iterable

import attrs

from .settings import Pace, Staleness


@attrs.define(kw_only=True)  # frozen costs a call for each field
class Load:
    """The load that admission decides on. Slots are counted in rollouts, everything else in groups.

    ``open``: the gate is open and the engine admits. ``eligible``: waiting groups whose backoff is over. ``finished``: ready
    groups and those whose rollouts are all over. ``bound``: the number of finished groups at which admission stops.
    ``fresh_room``: the number of groups that may start without becoming too old; None, any number. ``resting``: requeued
    groups that are backing off. Prompts stop being pulled while ``most_resting`` groups are backing off, so that an outage
    does not drain the source. ``ahead``: the number of prompts to have at hand, so that a free slot never waits for the
    source. ``needs``: the slots that each eligible group needs, in their order: one for each sample that it misses.
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
    needs: Iterable[int] = ()


def startable(load: Load) -> int:
    """Return how many waiting groups may start now: none while the buffer is full or the gate is closed."""
    if not load.open or load.finished >= load.bound:
        return 0
    free, count = load.free_slots, 0
    for need in load.needs:
        if need > free or (load.fresh_room is not None and count >= load.fresh_room):
            break
        free -= need
        count += 1
    return count


# The pool asks at each end of a rollout, and seven times of eight no whole group fits: these answer before there is a Load.
def may_start(*, free_slots: int, per_group: int) -> bool:
    """Return True if ``startable`` can be above 0 at all."""
    return free_slots >= per_group


def may_pull(*, free_slots: int, per_group: int, eligible: int, ahead: int) -> bool:
    """Return True if ``pullable`` can be above 0 at all."""
    return eligible < free_slots // per_group + ahead


def pullable(load: Load) -> int:
    """Return how many prompts to take from the source: as many as could start behind the waiting groups, and a few ahead."""
    if load.exhausted or not load.open or load.resting >= load.most_resting:
        return 0
    room = load.free_slots // load.per_group if load.finished < load.bound else 0
    if load.fresh_room is not None:
        room = min(room, load.fresh_room)
    return max(0, room + load.ahead - load.eligible)


def is_too_old(oldest: int | None, newest: int, staleness: Staleness) -> bool:
    """Return True if a group whose oldest token is of version ``oldest`` exceeds the bound at version ``newest``."""
    return staleness.max_versions is not None and oldest is not None and newest - oldest > staleness.max_versions


def paces(staleness: Staleness) -> bool:
    """Return True if admission keeps groups from becoming too old."""
    return staleness.max_versions is not None and isinstance(staleness.policy, Pace)


def is_due(begun: int | None, newest: int, staleness: Staleness) -> bool:
    """Return True if a running group must be in the next batch, because one version later it would be too old."""
    return paces(staleness) and begun is not None and newest - begun == staleness.max_versions


@attrs.frozen(kw_only=True)
class Flow:
    """Groups as pacing sees them. ``under_way``: running and finished; ``delivered``: since the newest version."""

    per_version: int
    under_way: int
    delivered: int
    wanted: int


def pace_room(flow: Flow, staleness: Staleness) -> int | None:
    """Return how many more groups may be started; None if any number.

    The groups that a waiting consumer asked for may always be started: they are consumed at once, under the version that
    they began with.
    """
    if not paces(staleness) or staleness.max_versions is None:
        return None
    ahead = (staleness.max_versions + 1) * flow.per_version - flow.delivered - flow.under_way
    return max(ahead, flow.wanted - flow.under_way, 0)
