"""A ledger's disk in memory: it logs every operation, fails when told to, and can lose power anywhere.

Drives the real storage code: segment files through the same port as the real disk, SQLite through a VFS.
"""

import errno
from collections.abc import Callable, Iterable, Sequence
from typing import final

import apsw
import attrs

from ..errors import LedgerError
from ._simfiles import Mark, Op, Rename, SimFiles, Sync, SyncNames, Write
from ._simvfs import connect

Fault = Callable[[int, Op], OSError | None]
"""Asked before each operation, with its number: the error it ends with, or None."""


def disk_full_from(number: int) -> Fault:
    """No room from this operation on: writes fail half done, everything else goes on."""

    def fault(index: int, op: Op) -> OSError | None:
        grows = isinstance(op, Write) and op.data is not None
        return OSError(errno.ENOSPC, "no space left on the simulated disk") if index >= number and grows else None

    return fault


def failing_at(number: int) -> Fault:
    """One operation fails, those after it do not."""

    def fault(index: int, op: Op) -> OSError | None:
        del op
        return OSError(errno.EIO, "the simulated disk failed") if index == number else None

    return fault


@final
@attrs.define(eq=False, repr=False)
class SimDisk:
    """A directory in memory, for ``open_ledger(..., disk=SimDisk())``. Reopen it as often as you like.

    ``log`` holds every operation so far. ``deaf`` are operations that are reported done and forgotten: with a sync among
    them it is the disk that a program without that sync would see.
    """

    files: SimFiles = attrs.field(factory=SimFiles)
    fault: Fault | None = None
    deaf: Callable[[Op], bool] | None = None
    page_size: int = 512
    log: list[Op] = attrs.field(factory=list, init=False)
    _locked: bool = attrs.field(default=False, init=False)
    _closers: list[Callable[[], None]] = attrs.field(factory=list, init=False)

    def do(self, op: Op) -> None:
        """Log an operation and apply it, unless the fault says otherwise."""
        index = len(self.log)
        self.log.append(op)
        error = self.fault(index, op) if self.fault is not None else None
        if error is not None:
            if isinstance(op, Write) and op.data:
                self.files.apply(Write(op.name, op.offset, op.data[: len(op.data) // 2]))
            raise error
        if self.deaf is None or not self.deaf(op):
            self.files.apply(op)

    def mark(self, number: int) -> None:
        """Note in the log that the scenario came this far."""
        self.log.append(Mark(number))

    def connect(self) -> apsw.Connection:
        """A connection to the database on this disk."""
        db, close = connect(self, page_size=self.page_size)
        self._closers.append(close)
        return db

    def lock(self) -> None:
        """Take the disk; raises LedgerError if it is taken."""
        if self._locked:
            raise LedgerError("the simulated disk is in use: close the ledger that has it open")
        self._locked = True

    def unlock(self) -> None:
        """Let go of the disk."""
        self._locked = False
        while self._closers:
            self._closers.pop()()

    def names(self) -> list[str]:
        """The files there are."""
        return self.files.names()

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return len(self.files.content(name))

    def write(self, name: str, offset: int, parts: Sequence[bytes]) -> None:
        """Write these one behind the other from an offset on."""
        self.do(Write(name, offset, b"".join(parts)))

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes from an offset."""
        return bytes(self.files.content(name)[offset : offset + length])

    def truncate(self, name: str, length: int) -> None:
        """Cut a file."""
        self.do(Write(name, length, None))

    def rename(self, name: str, to: str) -> None:
        """Give a file another name."""
        self.do(Rename(name, to))

    def delete(self, name: str) -> None:
        """Remove a file."""
        self.do(Rename(name, None))

    def sync(self, name: str) -> None:
        """Make a file's content survive a power cut."""
        self.do(Sync(name))

    def sync_names(self) -> None:
        """Make creations, renames and deletions survive a power cut."""
        self.do(SyncNames())


def replay(log: Iterable[Op], *, deaf: Callable[[Op], bool] | None = None) -> "Iterable[tuple[int, SimFiles]]":
    """The directory before each operation of a log, and after the last one: where the power may fail."""
    files = SimFiles()
    index = -1
    for index, op in enumerate(log):
        yield index, files
        if deaf is None or not deaf(op):
            files.apply(op)
    yield index + 1, files
