"""The groups table: one row a group, moved along by events. Refuses what contradicts the row, before changing anything."""

from typing import final

import apsw
import attrs

from .._core.values import GroupId
from ..errors import LedgerError
from ._place import Inline, InSegment, Place

_FIELDS = "seq, state, attempt, step, segment, start, length, crc, body"


@attrs.frozen(kw_only=True)
class Row:
    """What is needed of a row to judge an event."""

    seq: int
    state: str
    attempt: int
    step: int | None
    place: Place | None


def place_of(segment: int | None, start: int, length: int, crc: int, body: bytes | None) -> Place | None:
    """The body's place from its columns; None if the row has none."""
    if segment is not None:
        return InSegment(segment, start, length, crc)
    return None if body is None else Inline(body)


def columns_of(place: Place | None) -> tuple[int | None, int | None, int | None, int | None, bytes | None]:
    """The columns segment, start, length, crc, body."""
    match place:
        case InSegment():
            return place.segment, place.offset, place.length, place.crc, None
        case Inline():
            return None, None, len(place.data), None, place.data
        case None:
            return None, None, None, None, None


@final
@attrs.define(eq=False, repr=False)
class Rows:
    """The table through a writer's connection. ``freed`` and ``used`` say which segment bytes an event dropped or took."""

    db: apsw.Connection
    _next: int = attrs.field(init=False)
    moved: list[tuple[int, int]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        row = self.db.execute("SELECT max(max(place), max(seq)) FROM groups").fetchone()
        self._next = (row[0] if row and isinstance(row[0], int) else 0) + 1

    def next_place(self) -> int:
        """The next number in the common order of pulls, requeues and finished groups."""
        self._next += 1
        return self._next - 1

    def find(self, gid: GroupId) -> Row | None:
        """The group's row, or None."""
        row = self.db.execute(f"SELECT {_FIELDS} FROM groups WHERE epoch = ? AND prompt = ?", tuple(gid)).fetchone()
        if row is None:
            return None
        seq, state, attempt, step, *place = row
        return Row(seq=seq, state=state, attempt=attempt, step=step, place=place_of(*place))

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
            "INSERT INTO groups(seq, epoch, prompt, state, place, segment, start, length, crc, body) "
            "VALUES(?, ?, ?, 'waiting', ?, ?, ?, ?, ?, ?)",
            (place, *gid, place, *columns_of(body)),
        )
        self._account(None, body)

    def update(self, row: Row, **columns: int | str | bytes | None) -> None:
        """Set columns of a row."""
        names = ", ".join(f"{name} = ?" for name in columns)
        self.db.execute(f"UPDATE groups SET {names} WHERE seq = ?", (*columns.values(), row.seq))

    def set_body(self, row: Row, body: Place | None) -> None:
        """Replace the row's body."""
        segment, start, length, crc, data = columns_of(body)
        self.update(row, segment=segment, start=start, length=length, crc=crc, body=data)
        self._account(row.place, body)

    def delete(self, row: Row) -> None:
        """Forget a group."""
        self.db.execute("DELETE FROM groups WHERE seq = ?", (row.seq,))
        self._account(row.place, None)

    def _account(self, before: Place | None, after: Place | None) -> None:
        if isinstance(before, InSegment):
            self.moved.append((before.segment, -before.length))
        if isinstance(after, InSegment):
            self.moved.append((after.segment, after.length))
