"""A ledger's disk in memory, which logs every operation, fails when told to, and can lose power anywhere.

The simulated disk

The ledger promises that an acknowledged commit survives a power cut (docs/decisions/0008-what-the-ledger-is-made-of.md). A
``kill -9`` cannot test that: the kernel keeps the page cache of a killed process. So the real storage code runs on this disk,
which knows what is durable:

- Segment files come through the port that the real disk has (``read``, ``write``, ``sync``, ...). SQLite comes through a VFS: each
  of its system calls becomes an operation of the same log. Both kinds of file thus share one order of events.
- Every operation is a value (``Write``, ``Sync``, ``Rename``, ``SyncNames``), logged and then applied to ``SimFiles``. The log can be
  replayed up to any operation, and there the power cut: for each of these moments ``SimFiles.after_power_cut`` gives the
  directories that a disk may be left with. Everything that was synced is there; of the rest any subset, in any order, torn.
- ``fault`` fails an operation with an error; ``deaf`` lets an operation report success without effect. With a sync among them,
  the disk is one on which the program forgot that sync, and the test of the promise must fail.

The one difference to the real disk: a VFS in Python has no shared memory, so the index of SQLite's write-ahead log lives in
the connection (``locking_mode = EXCLUSIVE``), and no second connection can open the database.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Any, final

import apsw
import attrs

from ...errors import LedgerError
from .files import Mark, Op, Rename, SimFiles, Sync, SyncNames, Write

Fault = Callable[[int, Op], OSError | None]
"""A function that is called before each operation with its number, and returns the error to raise, or None."""


def disk_full_from(number: int) -> Fault:
    """Return a fault: the disk is full from this operation on. Writes fail half done, everything else works."""

    def fault(index: int, op: Op) -> OSError | None:
        grows = isinstance(op, Write) and op.data is not None
        return OSError(errno.ENOSPC, "no space left on the simulated disk") if index >= number and grows else None

    return fault


def failing_at(number: int) -> Fault:
    """Return a fault: this one operation fails."""
    return lambda index, _op: OSError(errno.EIO, "the simulated disk failed") if index == number else None


@final
@attrs.define(eq=False, repr=False)
class SimDisk:
    """A directory in memory, for ``open_ledger(..., disk=SimDisk())``. It may be opened again and again.

    ``log`` holds every operation so far. Operations for which ``deaf`` returns True are reported done and forgotten.
    """

    files: SimFiles = attrs.field(factory=SimFiles)
    fault: Fault | None = None
    deaf: Callable[[Op], bool] | None = None
    page_size: int = 512
    log: list[Op] = attrs.field(factory=list, init=False)
    _locked: bool = attrs.field(default=False, init=False)
    _closers: list[Callable[[], None]] = attrs.field(factory=list, init=False)

    def do(self, op: Op) -> None:
        """Log an operation and apply it, unless ``fault`` returns an error."""
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
        """Mark in the log how far the scenario has come."""
        self.log.append(Mark(number))

    def connect(self, name: str = "ledger.db") -> apsw.Connection:
        """Open a connection to a database on this disk."""
        vfs = _Vfs(self)
        try:
            db = apsw.Connection(name, vfs=vfs.name)
        except BaseException:
            vfs.unregister()
            raise
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA wal_autocheckpoint = 40")  # soon enough for short scenarios to see it
        db.execute(f"PRAGMA page_size = {self.page_size}")
        self._closers.append(vfs.unregister)
        return db

    def lock(self) -> None:
        """Lock the disk; raises LedgerError if it is locked."""
        if self._locked:
            raise LedgerError("the simulated disk is in use: close the ledger that has it open")
        self._locked = True

    def unlock(self) -> None:
        """Unlock the disk."""
        self._locked = False
        while self._closers:
            self._closers.pop()()

    def names(self) -> list[str]:
        """Return the names of the files."""
        return self.files.names()

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return len(self.files.content(name))

    def write(self, name: str, offset: int, parts: Sequence[bytes]) -> None:
        """Write these parts, one behind the other, from an offset on."""
        self.do(Write(name, offset, b"".join(parts)))

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from an offset."""
        return bytes(self.files.content(name)[offset : offset + length])

    def truncate(self, name: str, length: int) -> None:
        """Truncate a file."""
        self.do(Write(name, length, None))

    def rename(self, name: str, to: str) -> None:
        """Rename a file."""
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


def _do(disk: SimDisk, op: Op) -> None:
    try:
        disk.do(op)
    except OSError as error:
        kind = apsw.FullError if error.errno == errno.ENOSPC else apsw.IOError
        raise kind(str(error)) from error


def _excepthook(_self: object, _etype: object, _evalue: object, _traceback: object) -> bool:
    """Swallow an error in the middle of SQLite's clean-up: it has no caller, and the disk's state shows it."""
    return True


@final
@attrs.define(eq=False, repr=False)
class _File:
    """An open database or log. ``fresh``: its name is not durable yet; SQLite's VFS syncs the directory then."""

    disk: SimDisk
    name: str
    fresh: bool

    def xRead(self, amount: int, offset: int) -> bytes:  # ruff: ignore[invalid-function-name]  SQLite's names
        return bytes(self.disk.files.content(self.name)[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:  # ruff: ignore[invalid-function-name]
        _do(self.disk, Write(self.name, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # ruff: ignore[invalid-function-name]
        _do(self.disk, Write(self.name, newsize, None))

    def xSync(self, flags: int) -> None:  # ruff: ignore[invalid-function-name]
        del flags
        _do(self.disk, Sync(self.name))
        if self.fresh:
            _do(self.disk, SyncNames())
            self.fresh = False

    def xFileSize(self) -> int:  # ruff: ignore[invalid-function-name]
        return len(self.disk.files.content(self.name))

    def xClose(self) -> None:  # ruff: ignore[invalid-function-name]
        pass

    def xLock(self, level: int) -> None:  # ruff: ignore[invalid-function-name]  the disk is locked as a whole
        pass

    def xUnlock(self, level: int) -> None:  # ruff: ignore[invalid-function-name]
        pass

    def xCheckReservedLock(self) -> bool:  # ruff: ignore[invalid-function-name]
        return False

    def xFileControl(self, op: int, ptr: int) -> bool:  # ruff: ignore[invalid-function-name]
        del op, ptr
        return False

    def xSectorSize(self) -> int:  # ruff: ignore[invalid-function-name]
        return 512

    def xDeviceCharacteristics(self) -> int:  # ruff: ignore[invalid-function-name]
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE  # as SQLite assumes of every disk on Linux

    excepthook = _excepthook


@final
class _Vfs(apsw.VFS):
    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.name = f"simdisk-{id(disk)}"  # names are global to the process
        super().__init__(self.name, base="")

    def xOpen(self, name: Any, flags: list[int]) -> Any:  # ruff: ignore[invalid-function-name]
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        absent = path not in self.disk.files.names()
        if absent:
            if not flags[0] & apsw.SQLITE_OPEN_CREATE:
                raise apsw.CantOpenError(f"no {path} on the simulated disk")
            _do(self.disk, Write(path, 0, b""))
        flags[1] = flags[0]
        log = flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL)
        return _File(self.disk, path, fresh=bool(absent and log))

    def xDelete(self, filename: str, syncdir: bool) -> None:  # ruff: ignore[invalid-function-name, boolean-type-hint-positional-argument]
        if filename in self.disk.files.names():
            _do(self.disk, Rename(filename, None))
        if syncdir:
            _do(self.disk, SyncNames())

    def xAccess(self, pathname: str, flags: int) -> bool:  # ruff: ignore[invalid-function-name]
        del flags
        return pathname in self.disk.files.names()

    def xFullPathname(self, name: str) -> str:  # ruff: ignore[invalid-function-name]
        return name

    excepthook = _excepthook  # type: ignore[assignment]
