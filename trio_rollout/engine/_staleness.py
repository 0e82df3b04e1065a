"""Keeping groups fresh: what pacing admits, what must be in the next batch, what is too old to be delivered."""

import logging
from collections.abc import Iterable
from typing import final

import attrs

from .._core.admission import Flow, is_due, is_too_old, pace_room, paces
from .._core.book import Entry
from .._core.settings import Discard, Staleness
from .._util.condition import Condition
from ._gate import Gate
from ._instruments import Instruments
from ._running import RunningAttempts

_LOGGER = logging.getLogger("trio_rollout")


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class StalenessPolicy:
    """Counts what is consumed a version, and applies the staleness settings to groups and attempts.

    ``came`` is what consumers wait on: new weights change what must be in their batch.
    """

    staleness: Staleness
    gate: Gate
    live: RunningAttempts
    instruments: Instruments
    came: Condition
    _asked: int = attrs.field(default=0, init=False)
    _delivered: int = attrs.field(default=0, init=False)
    _per_version: int = attrs.field(default=0, init=False)

    def note_asked(self, size: int) -> None:
        """A consumer wants so many groups; 0: nobody waits now."""
        self._asked = size
        self._per_version = self._per_version or size

    def note_delivered(self, count: int) -> None:
        """So many groups were handed out."""
        self._delivered += count

    def note_new_version(self) -> None:
        """The weights are new: what was consumed under the old ones is what a version consumes."""
        self._per_version = self._delivered or self._per_version
        self._delivered = 0
        self.came.notify()

    def room(self, under_way: int) -> int | None:
        """How many more groups admission may start now; None: any number."""
        flow = Flow(
            per_version=max(1, self._per_version),
            under_way=under_way,
            delivered=self._delivered,
            wanted=self._asked,
        )
        return pace_room(flow, self.staleness)

    def due(self) -> int:
        """How many running groups must be in the next batch, or they would become too old."""
        if not paces(self.staleness):
            return 0
        return sum(is_due(attempt.begun, self.gate.version, self.staleness) for attempt in self.live.all())

    def too_old(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those that must not be delivered any more."""
        if self.staleness.max_versions is None:
            return []
        newest = self.gate.version
        return [
            entry
            for entry in entries
            if entry.group is not None and is_too_old(entry.group.oldest_version, newest, self.staleness)
        ]

    def in_order(self, entries: Iterable[Entry]) -> list[Entry]:
        """The order of delivery: with pacing the oldest first, else as they came."""
        if not paces(self.staleness):
            return list(entries)
        return sorted(entries, key=_oldest)

    def note_recycled(self, entry: Entry) -> None:
        """A group was thrown away for its age; report a prompt that this keeps happening to."""
        policy = self.staleness.policy
        if isinstance(policy, Discard) and entry.recycles == policy.max_recycles:
            _LOGGER.warning("group %s was too old %d times and is starved", entry.id, entry.recycles)
            self.instruments.emit("group.starved", id=entry.id, recycles=entry.recycles)

    def is_too_old_at(self, begun: int | None) -> bool:
        """Whether a running group that began under this version would be discarded anyway."""
        return is_too_old(begun, self.gate.version, self.staleness)


def _oldest(entry: Entry) -> float:
    oldest = None if entry.group is None else entry.group.oldest_version
    return float("inf") if oldest is None else oldest
