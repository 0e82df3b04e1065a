"""The tables beside the groups: finished samples of groups that wait or are quarantined, and turns of unfinished samples.

A sample or a turn is written beside the run, batched with others, and its group does not wait for it. It may therefore come
late, and ``EventApplier`` decides whether it still counts (docs/decisions/0048-a-finished-sample-is-a-row.md,
docs/decisions/0052-recorded-turns-are-given-back.md).
"""

from collections.abc import Iterable, Iterator
from typing import Any, final

import apsw
import attrs

from .._core.values import Trajectory
from ..errors import LedgerError
from ._location import Inline, InSegment, Location, location_of, segment_columns


@attrs.frozen
class BodyRow:
    """A row of such a table whose body is in a segment."""

    table: "BodyTable"
    id: int
    location: InSegment


@final
@attrs.define(eq=False, repr=False)
class BodyTable:
    """A table of bodies that never change, through a writer's connection: ``samples`` or ``turns``.

    ``segment_changes`` is the list of all tables' changes.
    """

    name: str
    db: apsw.Connection
    segment_changes: list[tuple[int, int]]
    _is_empty: bool = attrs.field(init=False)
    """True until a row is stored: a run without turns, or of fast groups only, pays for no deletion."""

    def __attrs_post_init__(self) -> None:
        query = f"SELECT id FROM {self.name} LIMIT 1"  # ruff: ignore[hardcoded-sql-expression]  ours
        self._is_empty = not list(self.db.execute(query))

    def insert(self, body: Location, **columns: int) -> None:
        """Insert a row, unless there is one that it contradicts."""
        self._is_empty = False
        names, marks = ", ".join(columns), "?, " * len(columns)
        inserted = self.db.execute(
            f"INSERT INTO {self.name}({names}, segment, start, length, crc, body) "
            f"VALUES({marks}?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id",
            (*columns.values(), *segment_columns(body), body.data if isinstance(body, Inline) else None),
        ).fetchall()
        if inserted and isinstance(body, InSegment):
            self.segment_changes.append((body.segment, body.length))

    def delete(self, which: str, *values: int) -> None:
        """Delete the rows for which this SQL expression holds."""
        if self._is_empty:
            return
        query = f"DELETE FROM {self.name} WHERE {which} RETURNING segment, length"  # ruff: ignore[hardcoded-sql-expression]  ours
        for segment, length in self.db.execute(query, values):
            if segment is not None:
                self.segment_changes.append((segment, -length))

    def in_segment(self, segment: int) -> Iterator[BodyRow]:
        """Iterate over the rows whose bodies are in a segment."""
        query = f"SELECT id, segment, start, length, crc FROM {self.name} WHERE segment = ?"  # ruff: ignore[hardcoded-sql-expression]  ours
        for number, *columns in self.db.execute(query, (segment,)):
            yield BodyRow(self, number, InSegment(*columns))

    def move(self, row: BodyRow, to: InSegment) -> None:
        """Name another location of the same body."""
        self.db.execute(
            f"UPDATE {self.name} SET segment = ?, start = ?, length = ?, crc = ? WHERE id = ?",  # ruff: ignore[hardcoded-sql-expression]  ours
            (*segment_columns(to), row.id),
        )
        self.segment_changes += [(row.location.segment, -row.location.length), (to.segment, to.length)]


@final
@attrs.define(eq=False, repr=False)
class SampleRows:
    """The finished samples of groups, and the recorded turns of samples that are not finished."""

    samples: BodyTable
    turns: BodyTable

    def put(self, seq: int, index: int, attempt: int, body: Location, *, tokens: int = 0, scored: bool = True) -> None:
        """Store a sample in place of an older one and of its turns; a sample of a newer attempt stays."""
        self.samples.delete("seq = ? AND idx = ? AND attempt <= ?", seq, index, attempt)
        self.samples.insert(body, seq=seq, idx=index, attempt=attempt, tokens=tokens, scored=scored)
        self.turns.delete("seq = ? AND idx = ?", seq, index)

    def replace(self, seq: int, index: int, body: Location, *, scored: bool) -> None:
        """Store a sample with another reward in place of the stored one.

        Raises:
          LedgerError: there is none.
        """
        found = self.samples.db.execute(
            "SELECT attempt, tokens FROM samples WHERE seq = ? AND idx = ?", (seq, index)
        ).fetchone()
        if found is None:
            raise LedgerError(f"a new reward of sample {index} refused: the ledger has no such sample of that group")
        attempt, tokens = found
        self.put(seq, index, int(attempt), body, tokens=int(tokens), scored=scored)

    def drop(self, seq: int, indices: Iterable[int]) -> None:
        """Delete these samples of a group, as far as they are stored."""
        for index in indices:
            self.samples.delete("seq = ? AND idx = ?", seq, index)

    def drop_all(self, seq: int) -> None:
        """Delete all samples and all turns of a group."""
        self.samples.delete("seq = ?", seq)
        self.drop_all_turns(seq)

    def put_turn(self, seq: int, index: int, number: int, body: Location, *, tokens: int) -> None:
        """Store a turn of a sample."""
        self.turns.insert(body, seq=seq, idx=index, number=number, tokens=tokens)

    def drop_turns(self, seq: int, index: int, numbers: Iterable[int]) -> None:
        """Delete these turns of a sample, as far as they are stored."""
        for number in numbers:
            self.turns.delete("seq = ? AND idx = ? AND number = ?", seq, index, number)

    def drop_all_turns(self, seq: int) -> None:
        """Delete all turns of a group."""
        self.turns.delete("seq = ?", seq)


@attrs.frozen(kw_only=True)
class GroupSamples:
    """The samples that a ledger has of a group beside the group's body, by index.

    ``kept`` are finished; ``unscored`` are those of a quarantined group whose scorer failed for good.
    """

    kept: tuple[Trajectory, ...] = ()
    unscored: tuple[Trajectory, ...] = ()


Found = tuple[bool, Location]
"""A sample's row: True if the sample is scored, and the location of its body."""


def find_samples(db: apsw.Connection, seq: int) -> list[Found]:
    """Return the samples of a group, by index."""
    rows: Any = db.execute(
        "SELECT scored, segment, start, length, crc, body FROM samples WHERE seq = ? ORDER BY idx", (seq,)
    )
    return [(bool(scored), location) for scored, *rest in rows if (location := location_of(*rest)) is not None]


def find_turns(db: apsw.Connection, seq: int) -> list[tuple[int, Location]]:
    """Return the recorded turns of a group: the index of each one's sample, and the location of its body."""
    rows: Any = db.execute(
        "SELECT idx, segment, start, length, crc, body FROM turns WHERE seq = ? ORDER BY idx, number", (seq,)
    )
    return [(index, location) for index, *rest in rows if (location := location_of(*rest)) is not None]
