"""Staleness: the groups that pacing admits, those that must be in the next batch, and those too old to be delivered."""

from collections.abc import Iterable
from typing import final

import attrs

from .._core.admission import Flow, is_due, is_too_old, pace_room, paces
from .._core.book import Entry
from .._core.settings import Discard, Staleness
from ._gate import Gate
from ._running import RunningAttempts


@final
@attrs.define(eq=False, repr=False)
class StalenessPolicy:
    """Applies the staleness settings to groups and attempts, and counts how many groups a weight version consumes."""

    settings: Staleness
    gate: Gate
    running: RunningAttempts
    _asked: int = attrs.field(default=0, init=False)
    _delivered: int = attrs.field(default=0, init=False)
    _per_version: int = attrs.field(default=0, init=False)

    def note_asked(self, size: int) -> None:
        """Note that a consumer waits for ``size`` groups; 0 if none waits any more."""
        self._asked = size
        self._per_version = self._per_version or size

    def note_delivered(self, count: int) -> None:
        """Note that ``count`` groups were handed out."""
        self._delivered += count

    def note_new_version(self) -> None:
        """Note that the weights are new: the groups consumed under the old ones are what a version consumes."""
        self._per_version = self._delivered or self._per_version
        self._delivered = 0

    def room(self, under_way: int) -> int | None:
        """Return how many more groups admission may start now; None if any number."""
        flow = Flow(
            per_version=max(1, self._per_version),
            under_way=under_way,
            delivered=self._delivered,
            wanted=self._asked,
        )
        return pace_room(flow, self.settings)

    def due(self) -> int:
        """Return how many running groups must be in the next batch, because later they would be too old.

        No batch waits for a group of which a sample fails: those of its samples that grow too old are sampled again.
        """
        if not paces(self.settings):
            return 0
        version = self.gate.version
        return sum(is_due(attempt.begun, version, self.settings) and not attempt.is_held_up for attempt in self.running)

    def too_old(self, entries: Iterable[Entry], oldest: int | None) -> list[Entry]:
        """Return the groups that must not be delivered any more; ``oldest`` is the oldest version of any of them."""
        newest = self.gate.version
        if not is_too_old(oldest, newest, self.settings):
            return []
        return [
            entry
            for entry in entries
            if entry.group is not None and is_too_old(entry.group.oldest_version, newest, self.settings)
        ]

    def in_order(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the groups in the order of delivery: the oldest first with pacing, else as they came."""
        if not paces(self.settings):
            return list(entries)
        return sorted(entries, key=_oldest)

    def has_starved(self, entry: Entry) -> bool:
        """Return True if the group has just been thrown away for its age for the last time that the settings tolerate."""
        policy = self.settings.policy
        return isinstance(policy, Discard) and entry.recycles == policy.max_recycles

    def is_too_old_at(self, begun: int | None) -> bool:
        """Return True if a running group that began under this version would be discarded anyway."""
        return is_too_old(begun, self.gate.version, self.settings)


def _oldest(entry: Entry) -> float:
    oldest = None if entry.group is None else entry.group.oldest_version
    return float("inf") if oldest is None else oldest
