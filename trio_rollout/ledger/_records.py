"""What a writer is handed: events with everything that is large or the user's already encoded.

Encoding happens in the caller's task, before a write is accepted: what can't be encoded fails its own caller only.
"""

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from .._core.events import Event, Pulled, Quarantined, Ready, Requeued
from .._core.values import Failure
from ._codec import encode_data, encode_failure, encode_group, encode_prompt


@attrs.frozen(kw_only=True)
class Encoded:
    """An event; ``bodies`` are its prompts or its group, ``note`` the source's state, the rewards or the error."""

    event: Event
    bodies: tuple[bytes, ...] = ()
    note: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes that writing it takes, about."""
        return 100 + sum(map(len, self.bodies)) + len(self.note or b"")


Record: TypeAlias = tuple[Encoded, ...]
"""One caller's events: one transaction."""


def _error(failure: Failure | None) -> bytes | None:
    return None if failure is None else encode_failure(failure)


def encoded(event: Event) -> Encoded:
    """The event with its bodies encoded.

    Raises:
      DataRefused: user data in it can't be stored; says of which group, and where in it.

    """
    match event:
        case Pulled():
            return Encoded(
                event=event,
                bodies=tuple(map(encode_prompt, event.prompts)),
                note=encode_data("the source's state", event.source_state),
            )
        case Ready():
            rewards = [row.reward for row in event.group.trajectories]
            note = encode_data(f"the rewards of group {event.group.id}", rewards)
            return Encoded(event=event, bodies=(encode_group(event.group),), note=note)
        case Requeued():
            return Encoded(event=event, note=_error(event.error))
        case Quarantined():
            return Encoded(event=event, note=_error(event.report.error))
        case _:
            return Encoded(event=event)


def record_of(events: Sequence[Event]) -> Record:
    """One caller's events, encoded."""
    return tuple(map(encoded, events))


def size_of(record: Record) -> int:
    """Bytes that writing it takes, about."""
    return sum(item.size for item in record)
