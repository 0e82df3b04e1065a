"""The book of groups: the state of each, the number of its attempts, and the counts. No I/O, no clock.

Owns every group from its pull to its end. Groups that are through (acked, filtered, returned) are only counted, so that
memory does not grow with the run; of quarantined groups the reports are kept.

Invariant 1 (conservation): between any two calls, each pulled group is in exactly one state and the counts say so.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import final

import attrs

from ..errors import SourceError
from .enums import Cause
from .lifecycle import Event, State, step
from .samples import Samples
from .statistics import Counts
from .values import Group, GroupId, Prompt, QuarantineReport

_THROUGH = frozenset({State.ACKED, State.FILTERED, State.RETURNED})
# The events that may let a waiting task go on. The ready buffer tells of moves into and out of it; a start and an ack let
# nothing go on.
_TOLD = frozenset({Event.REQUEUE, Event.FILTER, Event.QUARANTINE, Event.RETURN})


def _tell_no_one() -> None:
    """Stand in for ``on_change`` where no task waits for the book."""


@attrs.define(eq=False, kw_only=True)
class Entry:
    """One group in the book.

    ``attempt`` numbers its attempts; ``samples`` live as long as the group is not settled; ``recycles`` counts its requeues for
    being stale.
    """

    id: GroupId
    prompt: Prompt
    state: State = State.WAITING
    attempt: int = 0
    samples: Samples = attrs.field(factory=lambda: Samples.of(1))
    recycles: int = 0
    group: Group | None = None


@final
@attrs.define(eq=False, repr=False)
class Book:
    """All groups by id, and how many are in each state.

    ``on_change`` is called after a group was requeued or has ended in another way than by becoming ready.
    """

    _on_change: Callable[[], None] = attrs.field(default=_tell_no_one, alias="on_change")
    _entries: dict[GroupId, Entry] = attrs.field(factory=dict, init=False)
    _counts: dict[State, int] = attrs.field(factory=lambda: dict.fromkeys(State, 0), init=False)
    _reports: list[QuarantineReport] = attrs.field(factory=list, init=False)
    _requeues: dict[Cause, int] = attrs.field(factory=lambda: dict.fromkeys(Cause, 0), init=False)
    pulled: int = attrs.field(default=0, init=False)

    def pull(self, prompt: Prompt, samples: int = 1) -> Entry:
        """Enter a prompt that has just come from the source and is to be sampled so many times.

        Raises:
          SourceError: a group of this id is in the book already.
        """
        return self.enter(Entry(id=prompt.group_id, prompt=prompt, samples=Samples.of(samples)))

    def enter(self, entry: Entry) -> Entry:
        """Enter a group in its state: one just pulled, or one that a ledger remembers.

        Raises:
          SourceError: a group of this id is in the book already.
        """
        if entry.id in self._entries:
            raise SourceError(
                f"the source gave prompt {entry.id.prompt!r} of epoch {entry.id.epoch} twice; its first group is "
                f"{self._entries[entry.id].state.value}. Ids must be unique within an epoch"
            )
        self._entries[entry.id] = entry
        self._counts[entry.state] += 1
        self.pulled += 1
        return entry

    def count_earlier(self, *, acked: int, filtered: int, reports: tuple[QuarantineReport, ...]) -> None:
        """Count groups that ended in an earlier run of the same ledger."""
        self._counts[State.ACKED] += acked
        self._counts[State.FILTERED] += filtered
        self._counts[State.QUARANTINED] += len(reports)
        self._reports.extend(reports)
        self.pulled += acked + filtered + len(reports)

    def apply(self, entry: Entry, event: Event) -> None:
        """Move a group along the table.

        Raises:
          IllegalTransition: the event is not possible in this state; nothing has changed.
        """
        after = step(entry.state, event)
        self._counts[entry.state] -= 1
        self._counts[after] += 1
        entry.state = after
        if after in _THROUGH or after is State.QUARANTINED:
            del self._entries[entry.id]
        if event in _TOLD:
            self._on_change()

    def start(self, entry: Entry) -> None:
        """Begin the next attempt."""
        self.apply(entry, Event.START)
        entry.attempt += 1

    def requeue(self, entry: Entry, cause: Cause) -> None:
        """End the attempt without a result."""
        self.apply(entry, Event.REQUEUE)
        self._requeues[cause] += 1

    def recycle(self, entry: Entry) -> None:
        """Requeue a finished group because it is too old; those of its samples that are still fresh enough are kept."""
        self.apply(entry, Event.STALE)
        entry.group = None
        entry.recycles += 1
        self._requeues[Cause.STALE] += 1

    def finish(self, entry: Entry, group: Group) -> None:
        """End the attempt with this scored group."""
        self.apply(entry, Event.FINISH)
        entry.group = group

    def quarantine(self, entry: Entry, report: QuarantineReport) -> None:
        """Give the group up."""
        self.apply(entry, Event.QUARANTINE)
        self._reports.append(report)

    @property
    def counts(self) -> Mapping[State, int]:
        """A live view of the number of groups in each state."""
        return self._counts

    def count(self, state: State) -> int:
        """Return the number of groups in this state."""
        return self._counts[state]

    @property
    def requeues(self) -> Counts:
        """Requeues so far, by cause."""
        return Counts(self._requeues)

    @property
    def reports(self) -> tuple[QuarantineReport, ...]:
        """The reports of the groups that were given up, in order."""
        return tuple(self._reports)

    def entries(self, *states: State) -> Iterator[Entry]:
        """Return the groups in these states, in the order in which they were pulled."""
        return iter([entry for entry in self._entries.values() if entry.state in states])
