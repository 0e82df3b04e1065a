"""The groups table: one row a group, moved along by events. Refuses what contradicts the row, before changing anything.

What each event does to the rows. One record is one transaction; an event that contradicts its row is refused.

Only the current attempt may settle: a result must carry a higher attempt number than the last one written, a stale group
the very number it finished under, and an ack the step it was delivered under.
"""

from collections.abc import Callable, Iterable
from typing import Any, assert_never, final

import apsw
import attrs

from .._core.enums import Cause
from .._core.events import Acked, Delivered, Filtered, Pulled, Quarantined, Ready, Requeued, Restored, VersionChanged
from .._core.values import GroupId
from ..errors import LedgerError
from . import _schema
from ._codec import prompt_of_group
from ._place import Inline, InSegment, Place
from ._records import Encoded

_FIND = "SELECT seq, state, attempt, step, segment, start, length, crc FROM groups WHERE epoch = ? AND prompt = ?"
_IN_SEGMENT = "SELECT seq, state, attempt, step, segment, start, length, crc FROM groups WHERE segment = ?"


@attrs.frozen(kw_only=True)
class Row:
    """What is needed of a row to judge an event; ``place`` only if its body lies in a segment."""

    seq: int
    state: str
    attempt: int
    step: int | None
    place: InSegment | None


def place_of(segment: int | None, start: int, length: int, crc: int, body: bytes | None) -> Place | None:
    """The body's place from its columns; None if the row has none."""
    if segment is not None:
        return InSegment(segment, start, length, crc)
    return None if body is None else Inline(body)


def _columns(place: Place | None) -> tuple[int | None, int | None, int | None, int | None]:
    """The columns segment, start, length, crc."""
    if isinstance(place, InSegment):
        return place.segment, place.offset, place.length, place.crc
    return None, None, None, None


def _row(columns: tuple[Any, ...]) -> Row:
    seq, state, attempt, step, segment, *place = columns
    where = None if segment is None else InSegment(segment, *place)
    return Row(seq=seq, state=state, attempt=attempt, step=step, place=where)


@final
@attrs.define(eq=False, repr=False)
class Rows:
    """The table through a writer's connection. ``moves`` says how many bytes of which segment were taken or dropped."""

    db: apsw.Connection
    _next: int = attrs.field(init=False)
    moves: list[tuple[int, int]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        row = self.db.execute("SELECT max(max(place), max(seq)) FROM groups").fetchone()
        self._next = (row[0] if row and isinstance(row[0], int) else 0) + 1

    def next_place(self) -> int:
        """The next number in the common order of pulls, requeues and finished groups."""
        self._next += 1
        return self._next - 1

    def find(self, gid: GroupId) -> Row | None:
        """The group's row, or None."""
        row = self.db.execute(_FIND, tuple(gid)).fetchone()
        return None if row is None else _row(row)

    def need(self, gid: GroupId, what: str, *states: str) -> Row:
        """The group's row, which must be in one of these states.

        Raises:
          LedgerError: it is not; nothing was changed.

        """
        row = self.find(gid)
        if row is None:
            raise LedgerError(f"{what} of group {gid} refused: the ledger has no such group (never pulled, or acked)")
        if row.state not in states:
            raise LedgerError(f"{what} of group {gid} refused: it is {row.state}, not {' or '.join(states)}")
        return row

    def insert(self, gid: GroupId, body: Place) -> None:
        """A group that was just pulled."""
        place = self.next_place()
        self.db.execute(
            "INSERT INTO groups(seq, epoch, prompt, state, place, segment, start, length, crc) "
            "VALUES(?, ?, ?, 'waiting', ?, ?, ?, ?, ?)",
            (place, *gid, place, *_columns(body)),
        )
        self._lay(place, None, body)

    def update(self, row: Row, **columns: int | str | bytes | None) -> None:
        """Set columns of a row."""
        names = ", ".join(f"{name} = ?" for name in columns)
        query = f"UPDATE groups SET {names} WHERE seq = ?"  # ruff: ignore[hardcoded-sql-expression]  our own keywords
        self.db.execute(query, (*columns.values(), row.seq))

    def set_body(self, row: Row, body: Place | None, **columns: int | str | bytes | None) -> None:
        """Replace the row's body, and set columns."""
        segment, start, length, crc = _columns(body)
        self.update(row, segment=segment, start=start, length=length, crc=crc, **columns)
        self._lay(row.seq, row.place, body)

    def body(self, row: Row) -> Place:
        """Where the row's body is; it must have one."""
        if row.place is not None:
            return row.place
        columns: Any = self.db.execute("SELECT body FROM bodies WHERE seq = ?", (row.seq,)).fetchone()
        if columns is None:
            raise AssertionError(f"row {row.seq} is {row.state} without a body")
        return Inline(columns[0])

    def delete(self, row: Row) -> None:
        """Forget a group."""
        self.db.execute("DELETE FROM groups WHERE seq = ?", (row.seq,))
        self._lay(row.seq, row.place, None)

    def in_segment(self, segment: int, *, limit: int) -> list[tuple[Row, InSegment]]:
        """Rows whose bodies lie in a segment, up to so many bytes, at least one if there is any."""
        found: list[tuple[Row, InSegment]] = []
        size = 0
        for row in map(_row, self.db.execute(_IN_SEGMENT, (segment,))):
            if row.place is None or (found and size + row.place.length > limit):
                break
            found.append((row, row.place))
            size += row.place.length
        return found

    def take_moves(self) -> list[tuple[int, int]]:
        """The moves since the last call."""
        moves, self.moves = self.moves, []
        return moves

    def _lay(self, seq: int, before: InSegment | None, after: Place | None) -> None:
        """Put the body into the database, or take it out, and note what segments gain or lose."""
        if isinstance(after, Inline):
            self.db.execute("REPLACE INTO bodies VALUES(?, ?)", (seq, after.data))
        elif before is None:
            self.db.execute("DELETE FROM bodies WHERE seq = ?", (seq,))
        if before is not None:
            self.moves.append((before.segment, -before.length))
        if isinstance(after, InSegment):
            self.moves.append((after.segment, after.length))


@final
@attrs.define(eq=False, repr=False)
class Apply:
    """Applies events to the rows, inside a transaction that the caller opened."""

    rows: Rows
    read: Callable[[Place], bytes]
    keep: bool
    """Whether groups that are through (acked, filtered) keep their rows and bodies."""

    def __call__(self, item: Encoded, places: Iterable[Place]) -> None:
        """Apply one event; ``places`` are where its bodies lie.

        Raises:
          LedgerError: it contradicts what the ledger knows.

        """
        event = item.event
        match event:
            case Pulled():
                self._pulled(event, places, item.note)
            case Requeued():
                self._requeued(event, item.note)
            case Ready():
                self._ready(event, next(iter(places)), item.note)
            case Filtered():
                row = self._current(event.id, event.attempt, "filtering")
                self._through(row, "filtered", reason=event.reason, attempt=event.attempt)
                self._count("filtered", 1)
            case Quarantined():
                self._quarantined(event, item.note)
            case Delivered():
                self._delivered(event)
            case Acked():
                self._acked(event)
            case Restored():
                self._restored(event)
            case VersionChanged():
                _schema.put(self.rows.db, "weight_version", event.version)
            case _:
                assert_never(event)

    def _pulled(self, event: Pulled, places: Iterable[Place], state: bytes | None) -> None:
        for prompt, place in zip(event.prompts, places, strict=True):
            gid = prompt.group_id
            if (row := self.rows.find(gid)) is not None:
                raise LedgerError(f"pull of group {gid} refused: it was pulled before and is {row.state}")
            self.rows.insert(gid, place)
        _schema.put(self.rows.db, "source_state", state or b"")

    def _current(self, gid: GroupId, attempt: int, what: str) -> Row:
        row = self.rows.need(gid, what, "waiting")
        if attempt <= row.attempt:
            raise LedgerError(f"{what} of group {gid} refused: attempt {attempt} is over, the last was {row.attempt}")
        return row

    def _requeued(self, event: Requeued, error: bytes | None) -> None:
        what = f"requeue ({event.cause.value})"
        if event.cause is Cause.STALE and (found := self.rows.find(event.id)) and found.state != "waiting":
            row = self._recycle(event, what)
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
            error=error,
            oldest=None,
            newest=None,
            rewards=None,
        )

    def _recycle(self, event: Requeued, what: str) -> Row:
        """A finished group is too old: its prompt takes its place again."""
        row = self.rows.need(event.id, what, "ready", "delivered")
        if event.attempt != row.attempt:
            raise LedgerError(f"{what} of group {event.id} refused: it has attempt {row.attempt}, not {event.attempt}")
        self.rows.set_body(row, Inline(prompt_of_group(self.read(self.rows.body(row)))))
        return row

    def _ready(self, event: Ready, place: Place, rewards: bytes | None) -> None:
        group = event.group
        row = self._current(group.id, group.attempt, "commit")
        self.rows.set_body(
            row,
            place,
            state="ready",
            place=self.rows.next_place(),
            attempt=group.attempt,
            free=0,
            oldest=group.oldest_version,
            newest=group.newest_version,
            rewards=rewards,
        )

    def _quarantined(self, event: Quarantined, error: bytes | None) -> None:
        report = event.report
        row = self.rows.need(report.id, "quarantine", "waiting")
        self.rows.update(
            row,
            state="quarantined",
            place=self.rows.next_place(),
            attempts=report.attempts,
            cause=report.cause.value,
            error=error,
        )

    def _delivered(self, event: Delivered) -> None:
        for gid in event.ids:
            row = self.rows.need(gid, f"delivery as step {event.step}", "ready", "delivered")
            self.rows.update(row, state="delivered", step=event.step)
        if event.step >= _schema.get_int(self.rows.db, "next_step"):
            _schema.put(self.rows.db, "next_step", event.step + 1)

    def _restored(self, event: Restored) -> None:
        """Ready again, in the places they had: before what finished later."""
        for gid in event.ids:
            row = self.rows.need(gid, f"restore of step {event.step}", "delivered")
            self.rows.update(row, state="ready", step=None)
        _schema.put(self.rows.db, "next_step", event.step + 1)

    def _acked(self, event: Acked) -> None:
        for gid in event.ids:
            row = self.rows.need(gid, f"ack of step {event.step}", "delivered")
            if row.step != event.step:
                raise LedgerError(f"ack of step {event.step} refused: group {gid} was delivered as step {row.step}")
            self._through(row, "acked")
        self._count("acked", len(event.ids))
        if event.step >= _schema.get_int(self.rows.db, "acked_step"):
            _schema.put(self.rows.db, "acked_step", event.step)

    def _through(self, row: Row, state: str, **columns: int | str) -> None:
        """The group ended well: keep of it what the policy says."""
        if not self.keep:
            self.rows.delete(row)
        elif state == "filtered":
            self.rows.set_body(row, None, state=state, place=self.rows.next_place(), **columns)
        else:
            self.rows.update(row, state=state, place=self.rows.next_place(), **columns)

    def _count(self, state: str, more: int) -> None:
        """Counts go on after the rows are gone."""
        _schema.put(self.rows.db, state, _schema.get_int(self.rows.db, state) + more)
