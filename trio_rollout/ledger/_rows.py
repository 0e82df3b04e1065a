"""The groups table, one row a group, and the effect of each event on it and on the group's samples.

``EventApplier`` applies an event to the rows; it refuses an event that contradicts its row before it changes anything. Only
the current attempt may settle: a result must have a higher attempt number than the last one written, a stale group exactly
the number it finished under, and an ack the step of the delivery. A sample is never refused: it is finished, whichever
attempt it is of, and it is ignored only once its group has settled.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, assert_never, final

import apsw
import attrs

from .._core.enums import Cause
from .._core.ledger_events import (
    Acked,
    Delivered,
    Filtered,
    Pulled,
    Quarantined,
    Ready,
    Requeued,
    Restored,
    SampleKept,
    SamplesDropped,
    SamplesTried,
    VersionChanged,
)
from .._core.values import GroupId
from ..errors import LedgerError
from . import _schema
from ._codec import encode_counts, prompt_of_group
from ._location import Inline, InSegment, Location, segment_columns
from ._samples import SampleRow, SampleRows
from ._transaction import EncodedEvent

_FIND = "SELECT seq, state, attempt, step, segment, start, length, crc FROM groups WHERE epoch = ? AND prompt = ?"
_IN_SEGMENT = "SELECT seq, state, attempt, step, segment, start, length, crc FROM groups WHERE segment = ?"


@attrs.frozen(kw_only=True)
class Row:
    """The columns by which an event is checked; ``location`` only if the body is in a segment."""

    seq: int
    state: str
    attempt: int
    step: int | None
    location: InSegment | None


def _row(columns: tuple[Any, ...]) -> Row:
    seq, state, attempt, step, segment, *rest = columns
    location = None if segment is None else InSegment(segment, *rest)
    return Row(seq=seq, state=state, attempt=attempt, step=step, location=location)


@final
@attrs.define(eq=False, repr=False)
class Rows:
    """The table, through a writer's connection, and with it the table of the groups' samples.

    ``segment_changes``: the bytes of each segment that rows took (> 0) or dropped (< 0).
    """

    db: apsw.Connection
    _next: int = attrs.field(init=False)
    samples: SampleRows = attrs.field(init=False)
    segment_changes: list[tuple[int, int]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.samples = SampleRows(self.db, self.segment_changes)
        row = self.db.execute("SELECT max(max(place), max(seq)) FROM groups").fetchone()
        self._next = (row[0] if row and isinstance(row[0], int) else 0) + 1

    def next_place(self) -> int:
        """Return the next number in the common order of pulls, requeues and finished groups."""
        self._next += 1
        return self._next - 1

    def find(self, gid: GroupId) -> Row | None:
        """Return the group's row, or None."""
        row = self.db.execute(_FIND, tuple(gid)).fetchone()
        return None if row is None else _row(row)

    def require(self, gid: GroupId, what: str, *states: str) -> Row:
        """Return the group's row, which must be in one of these states.

        Raises:
          LedgerError: there is no such row, or it is in another state; nothing was changed.
        """
        row = self.find(gid)
        if row is None:
            raise LedgerError(f"{what} of group {gid} refused: the ledger has no such group (never pulled, or acked)")
        if row.state not in states:
            raise LedgerError(f"{what} of group {gid} refused: it is {row.state}, not {' or '.join(states)}")
        return row

    def insert(self, gid: GroupId, body: Location) -> None:
        """Insert the row of a group that was just pulled."""
        place = self.next_place()
        self.db.execute(
            "INSERT INTO groups(seq, epoch, prompt, state, place, segment, start, length, crc) "
            "VALUES(?, ?, ?, 'waiting', ?, ?, ?, ?, ?)",
            (place, *gid, place, *segment_columns(body)),
        )
        self._store_body(place, None, body)

    def update(self, row: Row, **columns: int | str | bytes | None) -> None:
        """Set columns of a row."""
        names = ", ".join(f"{name} = ?" for name in columns)
        query = f"UPDATE groups SET {names} WHERE seq = ?"  # ruff: ignore[hardcoded-sql-expression]  our own keywords
        self.db.execute(query, (*columns.values(), row.seq))

    def set_body(self, row: Row, body: Location | None, **columns: int | str | bytes | None) -> None:
        """Replace the row's body, and set columns."""
        segment, start, length, crc = segment_columns(body)
        self.update(row, segment=segment, start=start, length=length, crc=crc, **columns)
        self._store_body(row.seq, row.location, body)

    def body(self, row: Row) -> Location:
        """Return the location of the row's body; the row must have one."""
        if row.location is not None:
            return row.location
        columns: Any = self.db.execute("SELECT body FROM bodies WHERE seq = ?", (row.seq,)).fetchone()
        if columns is None:
            raise AssertionError(f"row {row.seq} is {row.state} without a body")
        return Inline(columns[0])

    def delete(self, row: Row) -> None:
        """Delete a group's row and its body."""
        self.db.execute("DELETE FROM groups WHERE seq = ?", (row.seq,))
        self._store_body(row.seq, row.location, None)

    def in_segment(self, segment: int, *, limit: int) -> list[tuple[Row | SampleRow, InSegment]]:
        """Return rows whose bodies are in a segment, up to ``limit`` bytes, and at least one if there is any."""
        found: list[tuple[Row | SampleRow, InSegment]] = []
        size = 0
        groups: Iterator[Row | SampleRow] = map(_row, self.db.execute(_IN_SEGMENT, (segment,)))
        for row in chain(groups, self.samples.in_segment(segment)):
            if row.location is None or (found and size + row.location.length > limit):
                break
            found.append((row, row.location))
            size += row.location.length
        return found

    def move(self, row: Row | SampleRow, to: InSegment) -> None:
        """Name another location of the row's body."""
        if isinstance(row, SampleRow):
            self.samples.move(row, to)
        else:
            self.set_body(row, to)

    def take_segment_changes(self) -> list[tuple[int, int]]:
        """Return the changes since the last call."""
        changes = self.segment_changes.copy()
        self.segment_changes.clear()
        return changes

    def _store_body(self, seq: int, before: InSegment | None, after: Location | None) -> None:
        """Put the body into the database or remove it there, and note the bytes that segments gain or lose."""
        if isinstance(after, Inline):
            self.db.execute("REPLACE INTO bodies VALUES(?, ?)", (seq, after.data))
        elif before is None:
            self.db.execute("DELETE FROM bodies WHERE seq = ?", (seq,))
        if before is not None:
            self.segment_changes.append((before.segment, -before.length))
        if isinstance(after, InSegment):
            self.segment_changes.append((after.segment, after.length))


@final
@attrs.define(eq=False, repr=False)
class EventApplier:
    """Applies events to the rows, inside a database transaction that the caller opened."""

    rows: Rows
    read: Callable[[Location], bytes]
    keep: bool
    """True if finished groups (acked, filtered) keep their rows and bodies."""

    def apply(self, item: EncodedEvent, locations: Iterable[Location]) -> None:
        """Apply one event; ``locations`` are those of its bodies.

        Raises:
          LedgerError: the event contradicts what the ledger knows.
        """
        event = item.event
        match event:
            case Pulled():
                self._pulled(event, locations, item.note)
            case Requeued():
                self._requeued(event, item.note)
            case SampleKept() | SamplesDropped() | SamplesTried():
                self._samples(event, locations)
            case Ready():
                self._ready(event, next(iter(locations)), item.note)
            case Filtered():
                self._filtered(event)
            case Quarantined():
                self._quarantined(event, locations, item.note)
            case Delivered() | Acked() | Restored():
                self._batch(event)
            case VersionChanged():
                _schema.put(self.rows.db, "weight_version", event.version)
            case _:
                assert_never(event)

    def _pulled(self, event: Pulled, locations: Iterable[Location], state: bytes | None) -> None:
        for prompt, location in zip(event.prompts, locations, strict=True):
            gid = prompt.group_id
            if (row := self.rows.find(gid)) is not None:
                raise LedgerError(f"pull of group {gid} refused: it was pulled before and is {row.state}")
            self.rows.insert(gid, location)
        _schema.put(self.rows.db, "source_state", state or b"")

    def _current(self, gid: GroupId, attempt: int, what: str) -> Row:
        row = self.rows.require(gid, what, "waiting")
        if attempt <= row.attempt:
            raise LedgerError(f"{what} of group {gid} refused: attempt {attempt} is over, the last was {row.attempt}")
        return row

    def _samples(self, event: SampleKept | SamplesDropped | SamplesTried, locations: Iterable[Location]) -> None:
        """Keep, drop or count samples of a waiting group. Once the group has settled its samples do not count any more."""
        row = self.rows.find(event.id)
        if row is None or row.state != "waiting":
            return
        if isinstance(event, SamplesDropped):
            self.rows.samples.drop(row.seq, event.indices)
            return
        if isinstance(event, SamplesTried):
            self.rows.update(row, counts=encode_counts(event.samples))
            return
        (location,) = locations
        self.rows.samples.put(row.seq, event.trajectory.index, event.attempt, location)

    def _requeued(self, event: Requeued, error: bytes | None) -> None:
        what = f"requeue ({event.cause.value})"
        if event.cause is Cause.STALE and (found := self.rows.find(event.id)) and found.state != "waiting":
            row = self._requeue_stale(event, what)
        else:
            row = self._current(event.id, event.attempt, what)
        self.rows.update(
            row,
            state="waiting",
            place=self.rows.next_place(),
            attempt=event.attempt,
            attempts=event.attempts,
            free=event.unpenalized,
            step=None,
            cause=event.cause.value,
            counts=encode_counts(event.samples),
            error=error,
            oldest=None,
            newest=None,
            rewards=None,
        )

    def _requeue_stale(self, event: Requeued, what: str) -> Row:
        """Replace the body of a finished group that is too old by its prompt."""
        row = self.rows.require(event.id, what, "ready", "delivered")
        if event.attempt != row.attempt:
            raise LedgerError(f"{what} of group {event.id} refused: it has attempt {row.attempt}, not {event.attempt}")
        self.rows.set_body(row, Inline(prompt_of_group(self.read(self.rows.body(row)))))
        return row

    def _ready(self, event: Ready, location: Location, rewards: bytes | None) -> None:
        group = event.group
        row = self._current(group.id, group.attempt, "commit")
        self.rows.set_body(
            row,
            location,
            state="ready",
            place=self.rows.next_place(),
            attempt=group.attempt,
            free=0,
            counts=None,
            oldest=group.oldest_version,
            newest=group.newest_version,
            rewards=rewards,
        )
        self.rows.samples.drop_all(row.seq)

    def _filtered(self, event: Filtered) -> None:
        row = self._current(event.id, event.attempt, "filtering")
        self.rows.samples.drop_all(row.seq)
        self._finish(row, "filtered", reason=event.reason, attempt=event.attempt)
        self._count("filtered", 1)

    def _quarantined(self, event: Quarantined, unscored: Iterable[Location], error: bytes | None) -> None:
        report = event.report
        row = self.rows.require(report.id, "quarantine", "waiting")
        self.rows.update(
            row,
            state="quarantined",
            place=self.rows.next_place(),
            attempts=report.attempts,
            cause=report.cause.value,
            error=error,
        )
        for trajectory, location in zip(event.unscored, unscored, strict=True):
            self.rows.samples.put(row.seq, trajectory.index, row.attempt, location, scored=False)

    def _batch(self, event: Delivered | Acked | Restored) -> None:
        match event:
            case Delivered():
                self._delivered(event)
            case Acked():
                self._acked(event)
            case Restored():
                self._restored(event)

    def _delivered(self, event: Delivered) -> None:
        for gid in event.ids:
            row = self.rows.require(gid, f"delivery as step {event.step}", "ready", "delivered")
            self.rows.update(row, state="delivered", step=event.step)
        if event.step >= _schema.get_int(self.rows.db, "next_step"):
            _schema.put(self.rows.db, "next_step", event.step + 1)

    def _restored(self, event: Restored) -> None:
        """Make delivered groups ready again, in the order they had before the delivery."""
        for gid in event.ids:
            row = self.rows.require(gid, f"restore of step {event.step}", "delivered")
            self.rows.update(row, state="ready", step=None)
        _schema.put(self.rows.db, "next_step", event.step + 1)

    def _acked(self, event: Acked) -> None:
        for gid in event.ids:
            row = self.rows.require(gid, f"ack of step {event.step}", "delivered")
            if row.step != event.step:
                raise LedgerError(f"ack of step {event.step} refused: group {gid} was delivered as step {row.step}")
            self._finish(row, "acked")
        self._count("acked", len(event.ids))
        if event.step >= _schema.get_int(self.rows.db, "acked_step"):
            _schema.put(self.rows.db, "acked_step", event.step)

    def _finish(self, row: Row, state: str, **columns: int | str) -> None:
        """Keep or delete the row of a group that is acked or filtered."""
        if not self.keep:
            self.rows.delete(row)
        elif state == "filtered":
            self.rows.set_body(row, None, state=state, place=self.rows.next_place(), **columns)
        else:
            self.rows.update(row, state=state, place=self.rows.next_place(), **columns)

    def _count(self, state: str, more: int) -> None:
        """Count groups in a state; the counts outlive the rows."""
        _schema.put(self.rows.db, state, _schema.get_int(self.rows.db, state) + more)
