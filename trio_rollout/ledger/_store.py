"""The ledger on disk, without a clock or tasks: the database, the segments, and the order in which they are written.

Every method blocks and is called from one worker thread at a time. Invariant 1: a row names a body only after the body
is durable. Invariant 2: after a failed write the store is broken; nothing is written any more, the next open recovers.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, final

import apsw
import attrs

from .._core.events import Recovered, RunIdentity
from ..errors import LedgerError
from . import _schema
from ._apply import Apply
from ._disk import Disk
from ._place import Inline, Place
from ._records import Record
from ._recover import recovered
from ._rows import Rows

T = TypeVar("T")


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Store:
    """One open ledger directory."""

    where: str
    disk: Disk
    keep_acked: bool
    _db: apsw.Connection = attrs.field(init=False)
    _rows: Rows = attrs.field(init=False)
    _apply: Apply = attrs.field(init=False)
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
        self._db = self.disk.connect()
        _schema.prepare(self._db, self.where)
        self.disk.sync_names()
        self._rows = Rows(self._db)
        self._apply = Apply(rows=self._rows, read=self._read, keep=self.keep_acked)

    def close(self) -> None:
        """Close the database and let go of the directory."""
        try:
            if hasattr(self, "_db"):
                self._db.close(force=True)
        finally:
            self.disk.unlock()

    def begin(self, identity: RunIdentity) -> Recovered:
        """Bind the ledger to a run and read what it remembers."""
        self._guarded("binding it to this run", lambda: _schema.bind(self._db, identity, self.where))
        return self._guarded("reading it", lambda: recovered(self._db, self._read))

    def commit(self, batch: Sequence[Record]) -> list[LedgerError | None]:
        """Write a batch; each record's own refusal, or None.

        Raises:
          LedgerError: the write failed; nothing of the batch counts as written, and nothing ever will be.

        """
        return self._guarded(f"writing {len(batch)} records", lambda: self._commit(batch))

    def _commit(self, batch: Sequence[Record]) -> list[LedgerError | None]:
        with self._db:
            return [self._commit_one(record) for record in batch]

    def _commit_one(self, record: Record) -> LedgerError | None:
        try:
            with self._db:  # nested: a savepoint
                for item in record:
                    self._apply(item, [Inline(body) for body in item.bodies])
        except LedgerError as refusal:
            return refusal
        return None

    def _read(self, place: Place) -> bytes:
        if isinstance(place, Inline):
            return place.data
        raise AssertionError("no segments yet")

    def _guarded(self, what: str, call: Callable[[], T]) -> T:
        if self._broken is not None:
            raise self._broken
        try:
            return call()
        except (OSError, apsw.Error) as error:
            self._broken = LedgerError(f"ledger {self.where}: {what} failed: {error}")
            raise self._broken from error
