"""The samples table: finished samples of groups that wait or are quarantined, one row a sample.

A sample is written beside the run, batched with others, and its group does not wait for it. It may therefore come late, and
``EventApplier`` decides whether it still counts (docs/decisions/0048-a-finished-sample-is-a-row.md).
"""

from collections.abc import Iterable, Iterator
from typing import Any, final

import apsw
import attrs

from .._core.values import Trajectory
from ..errors import LedgerError
from ._location import Inline, InSegment, Location, location_of, segment_columns


@attrs.frozen
class SampleRow:
    """A sample whose body is in a segment."""

    id: int
    location: InSegment


@final
@attrs.define(eq=False, repr=False)
class SampleRows:
    """The table, through a writer's connection. ``segment_changes`` is the list of all tables' changes."""

    db: apsw.Connection
    segment_changes: list[tuple[int, int]]

    def put(self, seq: int, index: int, attempt: int, body: Location, *, tokens: int = 0, scored: bool = True) -> None:
        """Store a sample of a group in place of an older one; a sample of a newer attempt stays."""
        self._delete("seq = ? AND idx = ? AND attempt <= ?", seq, index, attempt)
        inserted = self.db.execute(
            "INSERT INTO samples(seq, idx, attempt, tokens, scored, segment, start, length, crc, body) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id",
            (
                *(seq, index, attempt, tokens, scored),
                *segment_columns(body),
                body.data if isinstance(body, Inline) else None,
            ),
        ).fetchall()
        if inserted and isinstance(body, InSegment):
            self.segment_changes.append((body.segment, body.length))

    def replace(self, seq: int, index: int, body: Location, *, scored: bool) -> None:
        """Store a sample with another reward in place of the stored one.

        Raises:
          LedgerError: there is none.
        """
        found = self.db.execute(
            "SELECT attempt, tokens FROM samples WHERE seq = ? AND idx = ?", (seq, index)
        ).fetchone()
        if found is None:
            raise LedgerError(f"a new reward of sample {index} refused: the ledger has no such sample of that group")
        attempt, tokens = found
        self.put(seq, index, int(attempt), body, tokens=int(tokens), scored=scored)

    def drop(self, seq: int, indices: Iterable[int]) -> None:
        """Delete these samples of a group, as far as they are stored."""
        for index in indices:
            self._delete("seq = ? AND idx = ?", seq, index)

    def drop_all(self, seq: int) -> None:
        """Delete all samples of a group."""
        self._delete("seq = ?", seq)

    def in_segment(self, segment: int) -> Iterator[SampleRow]:
        """Iterate over the samples whose bodies are in a segment."""
        for number, *columns in self.db.execute(
            "SELECT id, segment, start, length, crc FROM samples WHERE segment = ?", (segment,)
        ):
            yield SampleRow(number, InSegment(*columns))

    def move(self, row: SampleRow, to: InSegment) -> None:
        """Name another location of the same body."""
        self.db.execute(
            "UPDATE samples SET segment = ?, start = ?, length = ?, crc = ? WHERE id = ?",
            (*segment_columns(to), row.id),
        )
        self.segment_changes += [(row.location.segment, -row.location.length), (to.segment, to.length)]

    def _delete(self, which: str, *values: int) -> None:
        query = f"DELETE FROM samples WHERE {which} RETURNING segment, length"  # ruff: ignore[hardcoded-sql-expression]  ours
        for segment, length in self.db.execute(query, values):
            if segment is not None:
                self.segment_changes.append((segment, -length))


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
