"""The events of one ``Ledger.record`` call, with user data and everything large already encoded.

Encoding happens in the caller's task, before the write is accepted: data that can't be encoded fails its own caller only.
"""

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from .._core.ledger_events import (
    LedgerEvent,
    Pulled,
    Quarantined,
    Ready,
    Requeued,
    Rescored,
    SampleKept,
    TurnRecorded,
)
from .._core.values import Failure, Group
from ._codec import encode_data, encode_failure, encode_group, encode_prompt, encode_sample, encode_turn


@attrs.frozen(kw_only=True)
class EncodedEvent:
    """One event with its encoded parts."""

    event: LedgerEvent
    bodies: tuple[bytes, ...] = ()
    """The event's prompts, its samples, its turn, or its group."""
    note: bytes | None = None
    """The source's state, the rewards or the error."""


Transaction: TypeAlias = tuple[EncodedEvent, ...]
"""The events of one caller: all of them are written, or none."""


def encode_transaction(events: Sequence[LedgerEvent]) -> Transaction:
    """Encode the events of one caller.

    Raises:
      DataRefused: user data in them can't be stored; names the group and the place in its data.
    """
    return tuple(map(_encoded, events))


def size_of(transaction: Transaction) -> int:
    """Return the approximate bytes that the transaction takes on disk."""
    return sum(100 + sum(map(len, item.bodies)) + len(item.note or b"") for item in transaction)


def _encoded(event: LedgerEvent) -> EncodedEvent:
    bodies: tuple[bytes, ...] = ()
    note: bytes | None = None
    match event:
        case Pulled():
            note = encode_data("the source's state", event.source_state)
            bodies = tuple(map(encode_prompt, event.prompts))
        case Ready():
            bodies, note = (encode_group(event.group),), _rewards(event.group)
        case SampleKept():
            bodies = (encode_sample(event.id, event.trajectory),)
        case TurnRecorded():
            bodies = (encode_turn(event.id, event.index, event.record),)
        case Requeued():
            note = _error(event.error)
        case Quarantined() | Rescored():
            return _set_aside(event)
    return EncodedEvent(event=event, bodies=bodies, note=note)


def _set_aside(event: Quarantined | Rescored) -> EncodedEvent:
    """Encode an event that has the stored samples of a group; a finished group that was scored again is its own body."""
    if isinstance(event, Quarantined):
        bodies = tuple(encode_sample(event.report.id, row) for row in event.unscored)
        return EncodedEvent(event=event, bodies=bodies, note=_error(event.report.error))
    if event.group is not None:
        return EncodedEvent(event=event, bodies=(encode_group(event.group),), note=_rewards(event.group))
    bodies = tuple(encode_sample(event.id, row) for row in (*event.kept, *event.unscored))
    return EncodedEvent(event=event, bodies=bodies, note=_error(None if event.report is None else event.report.error))


def _rewards(group: Group) -> bytes:
    return encode_data(f"the rewards of group {group.id}", [row.reward for row in group.trajectories])


def _error(failure: Failure | None) -> bytes | None:
    return None if failure is None else encode_failure(failure)
