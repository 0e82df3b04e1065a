"""The ledger on disk, without a clock or tasks: the database, the segments, and the order in which they are written.

Every method blocks and is called from one worker thread at a time. Invariant 1: a row names a body only after the body
is durable. Invariant 2: after a failed write the store is broken: nothing is written any more, the next open recovers.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, final

import apsw
import attrs

from .._core.events import Recovered, RunIdentity
from ..errors import DataRefused, LedgerError
from . import _schema
from ._disk import Disk
from ._place import Inline, InSegment, Place
from ._records import Encoded, Record
from ._recover import recovered
from ._rows import Apply, Row, Rows
from ._segments import Segments

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOVED_AT_ONCE = 16 * 2**20  # as much as one batch


@attrs.frozen(kw_only=True)
class StoreLimits:
    """Sizes in bytes.

    Bodies above ``inline`` go to a segment if those of one batch exceed ``together``: below that the segment's own sync
    costs more than writing them twice, as the database does (benchmarks/bench_commit.py --threshold). A segment file
    ends at ``segment``.
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
    _apply: Apply = attrs.field(init=False)
    _segments: Segments = attrs.field(init=False)
    _free: int = attrs.field(default=0, init=False)
    _broken: LedgerError | None = attrs.field(default=None, init=False)

    def open(self) -> None:
        """Lock the directory, open the database, cut what no row names.

        Raises:
          LedgerError: it is in use, is of a newer format, is damaged, or can't be written.

        """
        self._guarded("opening it", self.disk.lock)
        try:
            self._guarded("opening it", self._open)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._db = db = self.disk.connect()
        _schema.prepare(db, self.where)
        self._segments = Segments(disk=self.disk, roll=self.limits.segment)
        self._segments.open(_schema.segments(db))
        self._rows = Rows(db)
        self._apply = Apply(rows=self._rows, read=self._read, keep=self.keep_acked)

    def close(self) -> None:
        """Close the database and let go of the directory."""
        try:
            if self._db is not None:
                self._db.close(force=True)
        except apsw.Error:
            pass  # it could not tidy its log, as SQLite's own VFS would not even say; the next open reads the log
        finally:
            self.disk.unlock()

    def begin(self, identity: RunIdentity) -> Recovered:
        """Bind the ledger to a run and read what it remembers."""

        def begin() -> Recovered:
            _schema.bind(self._rows.db, identity, self.where)
            return recovered(self._rows.db, self._read)

        return self._guarded("binding it to this run", begin)

    def commit(self, batch: Sequence[Record]) -> list[LedgerError | None]:
        """Write a batch; each record's own refusal, or None.

        Raises:
          LedgerError: the write failed; nothing of the batch counts as written, and nothing ever will be.

        """
        return self._guarded(f"writing {len(batch)} records", lambda: self._commit(batch))

    def _commit(self, batch: Sequence[Record]) -> list[LedgerError | None]:
        places = iter(self._lay([body for record in batch for item in record for body in item.bodies]))
        laid = [[(item, [next(places) for _ in item.bodies]) for item in record] for record in batch]
        fates: list[LedgerError | None] = []
        with self._rows.db as db:
            fates = [self._commit_one(record) for record in laid]
        self._segments.account(self._rows.take_moves())
        self._free = _schema.free_bytes(db)
        return fates

    def _lay(self, bodies: Sequence[bytes]) -> Iterator[Place]:
        """Put every body where it belongs; those in segments are durable from here on."""
        large = [body for body in bodies if len(body) > self.limits.inline]
        if sum(map(len, large)) <= self.limits.together:
            return map(Inline, bodies)
        laid = iter(self._segments.append(large))
        return (next(laid) if len(body) > self.limits.inline else Inline(body) for body in bodies)

    def _commit_one(self, record: Sequence[tuple[Encoded, Sequence[Place]]]) -> LedgerError | None:
        mark = len(self._rows.moves)
        try:
            with self._rows.db:  # inside a transaction: a savepoint
                for item, places in record:
                    self._apply(item, places)
        except LedgerError as refusal:
            fate = refusal
        except (ValueError, TypeError, OverflowError) as error:  # a value that SQLite has no place for
            fate = DataRefused(f"ledger {self.where}: an event can't be written: {error}")
        else:
            return None
        del self._rows.moves[mark:]
        return fate

    @property
    def untidy(self) -> bool:
        """Whether there are more dead bytes on disk than there may be."""
        return self._broken is None and (self._segments.victim() is not None or self._free > self._free_most)

    @property
    def _free_most(self) -> int:
        return self.limits.segment // 4  # together with the log well below the second of the two segments

    def tidy(self) -> None:
        """Give dead bytes back: delete the segments that no row names, empty those with few live bytes.

        Raises:
          LedgerError: it failed; the store is broken.

        """
        self._guarded("reclaiming space", self._tidy)

    def _tidy(self) -> None:
        while (victim := self._segments.victim()) is not None:
            self._segments.seal(victim)
            while page := self._rows.in_segment(victim, limit=_MOVED_AT_ONCE):
                self._move(page)
            self._segments.retire(victim)
        while self._free > self._free_most:
            _schema.shrink(self._rows.db)
            self._free = _schema.free_bytes(self._rows.db)

    def _move(self, page: Sequence[tuple[Row, InSegment]]) -> None:
        bodies = [self._segments.read(place) for _, place in page]
        places = self._segments.append(bodies)
        with self._rows.db:
            for (row, _), place in zip(page, places, strict=True):
                self._rows.set_body(row, place)
        self._segments.account(self._rows.take_moves())

    def _read(self, place: Place) -> bytes:
        return place.data if isinstance(place, Inline) else self._segments.read(place)

    def _guarded(self, what: str, call: Callable[[], T]) -> T:
        if self._broken is not None:
            raise self._broken
        try:
            return call()
        except (OSError, apsw.Error) as error:
            full = isinstance(error, apsw.FullError) or getattr(error, "errno", None) in _FULL
            hint = (
                "the disk is full: make room, then start again" if full else "start again to go on from what is on disk"
            )
            self._broken = LedgerError(
                f"ledger {self.where}: {what} failed, nothing more will be written: {error}; {hint}"
            )
            raise self._broken from error
