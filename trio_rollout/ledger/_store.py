"""The ledger on disk: the database, the segment files, and the order in which they are written. No clock, no tasks.

Every method blocks, and is called from one worker thread at a time. Invariant 1: a row names a body only after the body is
durable. Invariant 2: after a failed write nothing is written any more; the next open recovers.

A body goes where its batch makes it cheapest: a segment file costs one more sync, the database writes a body twice. Dead
bytes are bounded and not collected when convenient, so that one slow group can't keep the disk of a long run. Measurements
and limits: docs/decisions/0008-what-the-ledger-is-made-of.md.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TypeVar, final

import apsw
import attrs

from .._core.checks import names_suggested
from .._core.ledger_events import Recovered, Rescoring, RunIdentity, Stored
from .._core.lifecycle import State
from ..errors import DataRefused, LedgerError
from . import _rescoring, _schema
from ._disk import DATABASE, UNFINISHED, Disk
from ._location import Inline, InSegment, Location
from ._recover import recovered
from ._rows import EventApplier, Row, Rows
from ._samples import BodyRow
from ._segments import Segments, number_of
from ._transaction import EncodedEvent, Transaction

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_MOVED_AT_ONCE = 16 * 2**20  # bytes; as much as one batch


@names_suggested
@attrs.frozen(kw_only=True)
class StoreLimits:
    """Sizes in bytes.

    Bodies above ``inline`` go to a segment file if those of one batch exceed ``together``. Below that, the sync of the
    segment costs more than writing the bodies twice, as the database does (benchmarks/bench_commit.py --threshold). A
    segment file is closed at ``segment``.
    """

    inline: int = 4096
    together: int = 400 * 1024
    segment: int = 64 * 2**20


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Store:
    """One open ledger directory."""

    where: str
    disk: Disk
    keep_acked: bool = False
    limits: StoreLimits = attrs.field(factory=StoreLimits)
    _db: apsw.Connection | None = attrs.field(default=None, init=False)
    _rows: Rows = attrs.field(init=False)
    _applier: EventApplier = attrs.field(init=False)
    _segments: Segments = attrs.field(init=False)
    _free_bytes: int = attrs.field(default=0, init=False)
    _broken: LedgerError | None = attrs.field(default=None, init=False)

    def open(self) -> None:
        """Lock the directory, open the database, and cut off bodies that no row names.

        Raises:
          LedgerError: the ledger is in use, has a newer format, is damaged, or can't be written.
        """
        self._guarded("opening the ledger", self.disk.lock)
        try:
            self._guarded("opening the ledger", self._open)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if DATABASE not in (names := self.disk.names()):
            self._create(names)
        elif not self.disk.size(DATABASE):
            raise LedgerError(
                f"ledger {self.where}: {DATABASE} has 0 bytes, so its content was lost: restore the file, or use another "
                "directory"
            )
        self._db = db = self.disk.connect()
        _schema.prepare(db, self.where)
        self._segments = Segments(disk=self.disk, max_bytes=self.limits.segment)
        self._segments.open(_schema.segments(db))
        self._rows = Rows(db)
        self._applier = EventApplier(rows=self._rows, read=self._read, keep=self.keep_acked)

    def _create(self, names: Sequence[str]) -> None:
        """Make the database under another name, so that under its own the database is never empty.

        Raises:
          LedgerError: other files say that there was a database.
        """
        left = [name for name in names if number_of(name) is not None or name == f"{DATABASE}-wal"]
        if left:
            raise LedgerError(
                f"ledger {self.where} has {left[0]}, but no {DATABASE}: restore that file, or use another directory"
            )
        for name in names:
            if name.startswith(UNFINISHED):
                self.disk.delete(name)
        with closing(self.disk.connect(UNFINISHED)) as db:
            _schema.prepare(db, self.where)
        self.disk.rename(UNFINISHED, DATABASE)
        self.disk.sync_names()

    def close(self) -> None:
        """Close the database and unlock the directory."""
        try:
            if self._db is not None:
                self._db.close(force=True)
        except apsw.Error:
            pass  # SQLite could not clean up its log; the next open reads that log
        finally:
            self.disk.unlock()

    def begin(self, identity: RunIdentity, *, retry_quarantined: bool = False) -> Recovered:
        """Bind the ledger to a run and return everything it remembers.

        ``retry_quarantined``: quarantined groups wait again, behind all others, in the order in which they were pulled.

        Raises:
          LedgerError: the ledger belongs to another run, is half rescored, or is damaged.
        """

        def begin() -> Recovered:
            _schema.bind(self._rows.db, identity, self.where)
            if retry_quarantined:
                with self._rows.db:
                    self._rows.retry_quarantined()
            return recovered(self._rows.db, self._read)

        return self._guarded("binding the ledger to this run", begin)

    def begin_rescoring(self, reward: str, states: Sequence[State], *, again: bool) -> Rescoring:
        """Begin to score what is stored again, or go on with that; see ``_rescoring.begin``."""
        return self._guarded(
            "beginning to score again",
            lambda: _rescoring.begin(self._rows.db, self.where, reward, states, again=again),
        )

    def stored_after(self, place: int, number: int, states: Sequence[State], limit: int) -> list[Stored]:
        """Return the next groups that a rescoring has not been through; see ``_rescoring.stored_after``."""
        return self._guarded(
            "reading groups to score again",
            lambda: _rescoring.stored_after(self._rows.db, self._read, place, number, states, limit),
        )

    def finish_rescoring(self, number: int) -> None:
        """Note that a rescoring is through with every group; see ``_rescoring.finish``."""
        self._guarded("ending the rescoring", lambda: _rescoring.finish(self._rows.db, number))

    def commit(self, batch: Sequence[Transaction]) -> list[LedgerError | None]:
        """Write a batch, and return each transaction's refusal, or None.

        Raises:
          LedgerError: the write failed. Nothing of the batch counts as written, and nothing is written any more.
        """
        return self._guarded(f"writing a batch of {len(batch)}", lambda: self._commit(batch))

    def _commit(self, batch: Sequence[Transaction]) -> list[LedgerError | None]:
        bodies = [body for transaction in batch for item in transaction for body in item.bodies]
        locations = self._write_bodies(bodies)
        located = [[(item, [next(locations) for _ in item.bodies]) for item in transaction] for transaction in batch]
        results: list[LedgerError | None] = []
        with self._rows.db as db:
            results = [self._commit_one(transaction) for transaction in located]
        self._segments.apply_changes(self._rows.take_segment_changes())
        self._free_bytes = _schema.free_bytes(db)
        return results

    def _write_bodies(self, bodies: Sequence[bytes]) -> Iterator[Location]:
        """Return a location for every body. Bodies in segments are written and durable from here on."""
        large = [body for body in bodies if len(body) > self.limits.inline]
        if sum(map(len, large)) <= self.limits.together:
            return map(Inline, bodies)
        located = iter(self._segments.append(large))
        return (next(located) if len(body) > self.limits.inline else Inline(body) for body in bodies)

    def _commit_one(self, transaction: Sequence[tuple[EncodedEvent, Sequence[Location]]]) -> LedgerError | None:
        mark = len(self._rows.segment_changes)
        try:
            with self._rows.db:  # inside a transaction: a savepoint
                for item, locations in transaction:
                    self._applier.apply(item, locations)
        except LedgerError as error:
            refusal = error
        except (ValueError, TypeError, OverflowError) as error:  # a value that SQLite can't hold
            refusal = DataRefused(f"ledger {self.where}: an event can't be written: {error}")
        else:
            return None
        del self._rows.segment_changes[mark:]
        return refusal

    @property
    def needs_compaction(self) -> bool:
        """True if there are more dead bytes on disk than are allowed."""
        return self._broken is None and (
            self._segments.next_to_compact() is not None or self._free_bytes > self._most_free_bytes
        )

    @property
    def _most_free_bytes(self) -> int:
        # With the log this stays well below the two segments that the disk may hold beyond the live bytes.
        return self.limits.segment // 4

    def compact(self) -> None:
        """Free dead bytes: delete segments that no row names, and move the live bodies out of mostly dead ones.

        Raises:
          LedgerError: a write failed; nothing is written any more.
        """
        self._guarded("reclaiming space", self._compact)

    def _compact(self) -> None:
        while (segment := self._segments.next_to_compact()) is not None:
            self._segments.seal(segment)
            while page := self._rows.in_segment(segment, limit=_MOST_MOVED_AT_ONCE):
                self._move(page)
            self._segments.delete(segment)
        while self._free_bytes > self._most_free_bytes:
            _schema.shrink(self._rows.db)
            self._free_bytes = _schema.free_bytes(self._rows.db)

    def _move(self, page: Sequence[tuple[Row | BodyRow, InSegment]]) -> None:
        bodies = [self._segments.read(location) for _, location in page]
        locations = self._segments.append(bodies)
        with self._rows.db:
            for (row, _), location in zip(page, locations, strict=True):
                self._rows.move(row, location)
        self._segments.apply_changes(self._rows.take_segment_changes())

    def _read(self, location: Location) -> bytes:
        return location.data if isinstance(location, Inline) else self._segments.read(location)

    def _guarded(self, what: str, call: Callable[[], T]) -> T:
        if self._broken is not None:
            raise self._broken
        try:
            return call()
        except (OSError, apsw.Error) as error:
            full = isinstance(error, apsw.FullError) or getattr(error, "errno", None) in _FULL
            hint = (
                "the disk is full: free some space, then start again" if full else "start again to resume from the disk"
            )
            self._broken = LedgerError(
                f"ledger {self.where}: {what} failed and nothing more will be written: {error}; {hint}"
            )
            raise self._broken from error
        except LedgerError:
            raise
        except Exception as error:  # what was written can't have become this by itself
            self._broken = LedgerError(
                f"ledger {self.where}: {what} failed, because the ledger is damaged: {type(error).__name__}: {error}"
            )
            raise self._broken from error
