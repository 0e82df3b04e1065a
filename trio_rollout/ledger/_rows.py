"""The groups table: one row a group, moved along by events. Refuses what contradicts the row, before changing anything."""

from typing import Any, final

import apsw
import attrs

from .._core.values import GroupId
from ..errors import LedgerError
from ._place import Inline, InSegment, Place

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
