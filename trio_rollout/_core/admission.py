"""Who may start: pure decisions over slots, waiting groups and the ready buffer."""

import attrs


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
