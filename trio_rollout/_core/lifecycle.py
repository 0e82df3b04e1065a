"""A group's life as a table. No I/O, no clock; an illegal event raises and changes nothing."""

from .enums import TableKey


class State(TableKey):
    """The state of a group. Every pulled group is in exactly one of these."""

    WAITING = "waiting"
    """Pulled, or requeued: an attempt will be made."""
    RUNNING = "running"
    """An attempt is under way."""
    READY = "ready"
    """Finished; it waits for the trainer."""
    DELIVERED = "delivered"
    """Handed to the trainer, not acked yet."""
    ACKED = "acked"
    """The trainer's checkpoint has it: no restore goes back before it."""
    FILTERED = "filtered"
    """Finished and dropped by the user's filter."""
    QUARANTINED = "quarantined"
    """Given up, with its last error."""
    RETURNED = "returned"
    """Given back to the source at a drain."""


class Event(TableKey):
    """The events of a group's life."""

    START = "start"
    """An attempt begins."""
    REQUEUE = "requeue"
    """The attempt ended without a result."""
    FINISH = "finish"
    """The attempt ended with a scored group."""
    FILTER = "filter"
    """The scored group was dropped by the user's filter."""
    QUARANTINE = "quarantine"
    """No further attempt will be made."""
    STALE = "stale"
    """The trainer would get it now, but it is older than the staleness bound allows."""
    DELIVER = "deliver"
    """It is handed to the trainer."""
    ACK = "ack"
    """The trainer's checkpoint has the group."""
    RESTORE = "restore"
    """The trainer went back to an older checkpoint."""
    RETURN = "return"
    """The engine gives it back to the source."""


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WAITING: {
        Event.START: State.RUNNING,
        Event.QUARANTINE: State.QUARANTINED,
        Event.RETURN: State.RETURNED,
    },
    State.RUNNING: {
        Event.REQUEUE: State.WAITING,
        Event.FINISH: State.READY,
        Event.FILTER: State.FILTERED,
        Event.QUARANTINE: State.QUARANTINED,
        Event.RETURN: State.RETURNED,
    },
    State.READY: {
        Event.DELIVER: State.DELIVERED,
        Event.STALE: State.WAITING,
        Event.RETURN: State.RETURNED,
    },
    State.DELIVERED: {
        Event.ACK: State.ACKED,
        Event.RESTORE: State.READY,
    },
    State.ACKED: {},
    State.FILTERED: {},
    State.QUARANTINED: {},
    State.RETURNED: {},
}


class IllegalTransition(Exception):
    """An event that is not possible in a group's state: a defect of the engine, never of its user."""


def step(state: State, event: Event) -> State:
    """Return the state after ``event``.

    Raises:
      IllegalTransition: the table has no such entry.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"a group that is {state.value} cannot {event.value}") from None
