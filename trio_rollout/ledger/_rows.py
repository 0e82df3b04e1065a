"""The groups table, one row a group, and the effect of each event on it and on the group's samples.

``EventApplier`` applies an event to the rows; it refuses an event that contradicts its row before it changes anything. Only
the current attempt may settle: a result must have a higher attempt number than the last one written, a stale group exactly
the number it finished under, and an ack the step of the delivery. A sample or a turn is never refused: it is finished,
whichever attempt it is of, and it is ignored only once its group has settled.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    Rescored,
    Restored,
    Retried,
    SampleKept,
    SamplesDropped,
    SamplesTried,
    TurnRecorded,
    TurnsDropped,
    VersionChanged,
)
from .._core.samples import tokens_of
from .._core.values import GroupId, QuarantineReport
from ..errors import LedgerError
from . import _schema
from ._codec import decode_wasted, encode_counts, encode_wasted, prompt_of_group
from ._location import Inline, InSegment, Location, segment_columns
from ._samples import BodyRow, BodyTable, SampleRows
from ._transaction import EncodedEvent

_SELECT = "SELECT seq, state, attempt, step, segment, start, length, crc FROM groups WHERE"
_FIND = f"{_SELECT} epoch = ? AND prompt = ?"
_END = """
INSERT INTO ended(epoch, prompt, state, attempt, attempts, step, cause, reason, oldest, newest, rewards, tokens, wasted)
SELECT epoch, prompt, ?, attempt, attempts, step, cause, reason, oldest, newest, rewards, tokens, wasted FROM groups WHERE seq = ?
"""
_MOST_ENDED = 10_000
"""Groups whose rows outlive them, to be looked at: some 2 MB. All others are only counted."""
_IN_SEGMENT = f"{_SELECT} segment = ?"


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
        self.samples = SampleRows(*(BodyTable(name, self.db, self.segment_changes) for name in ("samples", "turns")))
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

    def quarantine(self, row: Row, report: QuarantineReport, error: bytes | None, **columns: bytes | None) -> None:
        """Move a group to the end of the quarantined ones, with this report and its encoded error; it has no turns any more."""
        self.samples.drop_all_turns(row.seq)
        self.update(
            row,
            state="quarantined",
            place=self.next_place(),
            attempts=report.attempts,
            cause=report.cause.value,
            error=error,
            **columns,
        )

    def retry(self, row: Row) -> None:
        """Let a quarantined group wait again, behind all others, with new tries; what was sampled for it stays."""
        self.update(row, state="waiting", place=self.next_place(), attempts=0, free=0, counts=None)

    def retry_quarantined(self) -> None:
        """Let all quarantined groups wait again, in the order of their pulls, but those that never had a try.

        The prompt of such a group could not be stored: there is nothing to try.
        """
        which = "state = 'quarantined' AND attempts > 0 ORDER BY seq"
        for row in map(_row, self.db.execute(f"{_SELECT} {which}").fetchall()):
            self.retry(row)

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

    def wasted(self, row: Row) -> bytes | None:
        """Return the encoded tokens that were wasted for the group."""
        found: Any = self.db.execute("SELECT wasted FROM groups WHERE seq = ?", (row.seq,)).fetchone()
        return None if found is None else found[0]

    def delete(self, row: Row) -> None:
        """Delete a group's row and its body."""
        self.db.execute("DELETE FROM groups WHERE seq = ?", (row.seq,))
        self._store_body(row.seq, row.location, None)

    def end(self, row: Row, state: str) -> None:
        """Delete a group's row and its body; what can be said of it without the body stays for a while."""
        self.db.execute(_END, (state, row.seq))
        self.delete(row)

    def forget_ended(self) -> None:
        """Delete the oldest of the rows that outlived their groups, if there are too many, and count their tokens."""
        old: Any = self.db.execute(
            "DELETE FROM ended WHERE id <= (SELECT max(id) FROM ended) - ? RETURNING state, tokens, wasted",
            (_MOST_ENDED,),
        ).fetchall()
        for state, tokens, wasted in old:
            _schema.add(self.db, f"{state}_tokens", tokens)
            for cause, lost in decode_wasted(wasted).items():
                _schema.add(self.db, f"wasted_{cause.value}", lost)

    def in_segment(self, segment: int, *, limit: int) -> list[tuple[Row | BodyRow, InSegment]]:
        """Return rows whose bodies are in a segment, up to ``limit`` bytes, and at least one if there is any."""
        found: list[tuple[Row | BodyRow, InSegment]] = []
        size = 0
        groups: Iterator[Row | BodyRow] = map(_row, self.db.execute(_IN_SEGMENT, (segment,)))
        tables = (self.samples.samples, self.samples.turns)
        for row in chain(groups, *(table.in_segment(segment) for table in tables)):
            if row.location is None or (found and size + row.location.length > limit):
                break
            found.append((row, row.location))
            size += row.location.length
        return found

    def move(self, row: Row | BodyRow, to: InSegment) -> None:
        """Name another location of the row's body."""
        if isinstance(row, BodyRow):
            row.table.move(row, to)
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
            case SampleKept() | SamplesDropped() | SamplesTried() | TurnRecorded() | TurnsDropped():
                self._samples(event, locations)
            case Ready():
                self._ready(event, next(iter(locations)), item.note)
            case Filtered():
                self._filtered(event)
            case Quarantined():
                self._quarantined(event, locations, item.note)
            case Rescored():
                self._rescored(event, list(locations), item.note)
            case Delivered() | Acked() | Restored() | Retried():
                self._moved(event)
            case VersionChanged():
                self._version_changed(event)
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

    def _samples(
        self,
        event: SampleKept | SamplesDropped | SamplesTried | TurnRecorded | TurnsDropped,
        locations: Iterable[Location],
    ) -> None:
        """Keep, drop or count samples or turns of a waiting group. Once the group has settled they do not count any more."""
        row = self.rows.find(event.id)
        if row is None or row.state != "waiting":
            return
        samples = self.rows.samples
        match event:
            case SampleKept(attempt=attempt, trajectory=trajectory, tokens=tokens, scored=scored):
                (location,) = locations
                samples.put(row.seq, trajectory.index, attempt, location, tokens=tokens, scored=scored)
            case SamplesDropped(indices=indices):
                samples.drop(row.seq, indices)
            case SamplesTried(samples=counts, wasted=wasted):
                self.rows.update(row, counts=encode_counts(counts), wasted=encode_wasted(wasted))
            case TurnRecorded(index=index, record=record):
                (location,) = locations
                samples.put_turn(row.seq, index, record.number, location, tokens=record.tokens)
            case TurnsDropped(index=index, numbers=numbers):
                samples.drop_turns(row.seq, index, numbers)

    def _requeued(self, event: Requeued, error: bytes | None) -> None:
        what = f"requeue ({event.cause.value})"
        if event.cause is Cause.STALE and (found := self.rows.find(event.id)) and found.state != "waiting":
            row = self._requeue_stale(event, what)
            wasted = self._with_earlier_waste(row, event.wasted)
        else:
            row, wasted = self._current(event.id, event.attempt, what), event.wasted
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
            tokens=0,
            wasted=encode_wasted(wasted),
        )

    def _with_earlier_waste(self, row: Row, wasted: Mapping[Cause, int]) -> Mapping[Cause, int]:
        """Return the larger number for each cause: a run does not know what was wasted for a group that it found ready."""
        known = decode_wasted(self.rows.wasted(row))
        return {cause: max(known.get(cause, 0), wasted.get(cause, 0)) for cause in known | dict(wasted)}

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
            tokens=event.tokens,
            wasted=encode_wasted(event.wasted),
        )
        self.rows.samples.drop_all(row.seq)

    def _filtered(self, event: Filtered) -> None:
        row = self._current(event.id, event.attempt, "filtering")
        self.rows.samples.drop_all(row.seq)
        self.rows.update(
            row,
            reason=event.reason,
            attempt=event.attempt,
            tokens=event.tokens,
            wasted=encode_wasted(event.wasted),
        )
        self._finish([row], "filtered")

    def _quarantined(self, event: Quarantined, unscored: Iterable[Location], error: bytes | None) -> None:
        report = event.report
        row = self.rows.require(report.id, "quarantine", "waiting")
        self.rows.quarantine(row, report, error, wasted=encode_wasted(event.wasted))
        for trajectory, location in zip(event.unscored, unscored, strict=True):
            tokens = tokens_of(trajectory)
            self.rows.samples.put(row.seq, trajectory.index, row.attempt, location, tokens=tokens, scored=False)

    def _rescored(self, event: Rescored, locations: Sequence[Location], note: bytes | None) -> None:
        what = f"rescoring {event.number}"
        if event.group is not None:
            row = self.rows.require(event.id, what, "ready", "delivered", "acked")
            if event.group.attempt != row.attempt:
                raise LedgerError(
                    f"{what} of group {event.id} refused: it has attempt {row.attempt}, not {event.group.attempt}"
                )
            self.rows.set_body(row, locations[0], rewards=note, rescored=event.number)
            return
        row = self.rows.require(event.id, what, "waiting", "quarantined")
        for place, trajectory in enumerate((*event.kept, *event.unscored)):
            self.rows.samples.replace(row.seq, trajectory.index, locations[place], scored=place < len(event.kept))
        self.rows.update(row, rescored=event.number)
        if event.report is not None:
            self.rows.quarantine(row, event.report, note)

    def _moved(self, event: Delivered | Acked | Restored | Retried) -> None:
        match event:
            case Retried():
                self.rows.retry(self.rows.require(event.id, "another try", "quarantined"))
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
        rows: list[Row] = []
        for gid in event.ids:
            row = self.rows.require(gid, f"ack of step {event.step}", "delivered")
            if row.step != event.step:
                raise LedgerError(f"ack of step {event.step} refused: group {gid} was delivered as step {row.step}")
            rows.append(row)
        self._finish(rows, "acked")
        if event.step >= _schema.get_int(self.rows.db, "acked_step"):
            _schema.put(self.rows.db, "acked_step", event.step)

    def _version_changed(self, event: VersionChanged) -> None:
        top = max(event.version, _schema.get_int(self.rows.db, "top_version"))
        _schema.put(self.rows.db, "top_version", top)
        _schema.put(self.rows.db, "weight_version", event.version)
        _schema.put(self.rows.db, "version_named_by", json.dumps(event.named_by))

    def _finish(self, rows: Sequence[Row], state: str) -> None:
        """Keep or delete the rows of groups that are acked or filtered, and count them; the counts outlive the rows."""
        for row in rows:
            if not self.keep:
                self.rows.end(row, state)
            elif state == "filtered":
                self.rows.set_body(row, None, state=state, place=self.rows.next_place())
            else:
                self.rows.update(row, state=state, place=self.rows.next_place())
        if not self.keep:
            self.rows.forget_ended()
        _schema.add(self.rows.db, state, len(rows))
