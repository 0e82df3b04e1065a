"""SQLite on a simulated disk: the calls of a VFS, turned into the disk's operations.

A VFS in Python has no shared memory, so the write-ahead log's index lives in the connection: nobody else can open the
database. All else is as on the real disk.
"""

import errno
from collections.abc import Callable
from typing import Any, Protocol, final

import apsw
import attrs

from ._simfiles import Op, Rename, SimFiles, Sync, SyncNames, Write

DATABASE = "ledger.db"


class Target(Protocol):
    """What the VFS needs of a disk."""

    files: SimFiles

    def do(self, op: Op) -> None:
        """Perform an operation, or raise OSError."""
        ...


def _do(disk: Target, op: Op) -> None:
    try:
        disk.do(op)
    except OSError as error:
        kind = apsw.FullError if error.errno == errno.ENOSPC else apsw.IOError
        raise kind(str(error)) from error


def _excepthook(_self: object, _etype: object, _evalue: object, _traceback: object) -> bool:
    """An error in the middle of SQLite's own clean-up has nobody to be told to; the disk's state shows it."""
    return True


@final
@attrs.define(eq=False, repr=False)
class _File:
    """An open database or log. ``fresh``: its name is not durable yet, and SQLite's own VFS would see to that."""

    disk: Target
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
    def __init__(self, disk: Target) -> None:
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


def connect(disk: Target, *, page_size: int) -> tuple[apsw.Connection, Callable[[], None]]:
    """A connection to the disk's database, and what to call when it is closed."""
    vfs = _Vfs(disk)
    try:
        db = apsw.Connection(DATABASE, vfs=vfs.name)
    except BaseException:
        vfs.unregister()
        raise
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("PRAGMA wal_autocheckpoint = 40")  # soon enough for short scenarios to see it
    db.execute(f"PRAGMA page_size = {page_size}")
    return db, vfs.unregister
