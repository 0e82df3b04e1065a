"""The disk as the ledger uses it: a directory with segment files, a database and a lock. A simulation has its own disk.

Every call blocks, and is made from one worker thread at a time. On the real disk the files are private to their user (0600,
in a directory of 0700), and no symbolic link in the directory is followed: the name of a ledger's file is never another's.
"""

import errno
import fcntl
import itertools
import os
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, final

import apsw
import attrs

from ..errors import LedgerError

DATABASE = "ledger.db"
UNFINISHED = "ledger.new"
"""A database that is being made; it gets its name once it is complete."""
_LOCK = "lock"
_PARTS = 1024  # IOV_MAX on Linux and macOS


class Disk(Protocol):
    """A directory. Names are file names in it; nothing is durable before ``sync`` or ``sync_names``."""

    def connect(self, name: str = DATABASE) -> apsw.Connection:
        """Open a database for writing; create it if it does not exist."""
        ...

    def lock(self) -> None:
        """Lock the directory for this process.

        Raises:
          LedgerError: a living process has locked it.
        """
        ...

    def unlock(self) -> None:
        """Unlock the directory."""
        ...

    def names(self) -> list[str]:
        """Return the names of the files."""
        ...

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def write(self, name: str, offset: int, parts: Sequence[bytes]) -> None:
        """Write these parts one after the other at an offset; create the file if it does not exist."""
        ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from an offset."""
        ...

    def truncate(self, name: str, length: int) -> None:
        """Cut a file to a length."""
        ...

    def rename(self, name: str, to: str) -> None:
        """Rename a file."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file."""
        ...

    def sync(self, name: str) -> None:
        """Make the content of a file durable."""
        ...

    def sync_names(self) -> None:
        """Make creations, renames and deletions durable."""
        ...


@final
@attrs.define(eq=False, repr=False)
class RealDisk:
    """A directory of a file system."""

    path: Path
    _lock: int | None = attrs.field(default=None, init=False)
    _open: dict[str, int] = attrs.field(factory=dict, init=False)

    def _file(self, name: str) -> int:
        """Return the file's descriptor. One stays open: that of the segment that is being written."""
        if name not in self._open:
            self._close_all()
            self._open[name] = open_own(self.path / name, os.O_RDWR | os.O_CREAT)
        return self._open[name]

    def _close_all(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def connect(self, name: str = DATABASE) -> apsw.Connection:
        path = self.path / name
        os.close(open_own(path, os.O_RDWR | os.O_CREAT))  # SQLite gives its log and index the mode of the database
        return apsw.Connection(os.fspath(path))

    def lock(self) -> None:
        _make_durably(self.path, mode=0o700)
        fd = open_own(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        begun_by = os.pread(fd, 32, 0).strip(b"\0")  # a power cut may leave zeros
        if begun_by and not begun_by.isdigit():
            os.close(fd)
            raise LedgerError(f"ledger {self.path}: {_LOCK} is no lock of a ledger, but begins with {begun_by!r}")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            holder = _holder_of(fd, begun_by.decode())
            os.close(fd)
            raise LedgerError(
                f"ledger {self.path} is in use by {holder}: stop that run, or use another directory"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        self._lock = fd

    def unlock(self) -> None:
        self._close_all()
        if self._lock is not None:
            os.close(self._lock)  # the file stays: deleting it would let two processes lock two files of one name
            self._lock = None

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir())

    def size(self, name: str) -> int:
        fd = open_own(self.path / name, os.O_RDONLY)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def write(self, name: str, offset: int, parts: Sequence[bytes]) -> None:
        fd, rest = self._file(name), deque(memoryview(part) for part in parts if part)
        while rest:
            done = os.pwritev(fd, list(itertools.islice(rest, _PARTS)), offset)
            offset += done
            while done:
                part = rest.popleft()
                if done < len(part):
                    rest.appendleft(part[done:])
                done -= min(done, len(part))

    def read(self, name: str, offset: int, length: int) -> bytes:
        return read_at(self.path / name, offset, length)

    def truncate(self, name: str, length: int) -> None:
        os.ftruncate(self._file(name), length)

    def rename(self, name: str, to: str) -> None:
        self._close_all()
        (self.path / name).rename(self.path / to)

    def delete(self, name: str) -> None:
        self._close_all()
        (self.path / name).unlink()

    def sync(self, name: str) -> None:
        os.fdatasync(self._file(name))

    def sync_names(self) -> None:
        _sync_directory(self.path)


def _make_durably(path: Path, *, mode: int = 0o777) -> None:
    """Create a directory and its parents so that they survive a power cut. The parents get the usual mode."""
    if not path.is_dir():
        _make_durably(path.parent)
        path.mkdir(mode=mode, exist_ok=True)
        _sync_directory(path.parent)


def open_own(path: Path, flags: int) -> int:
    """Open a file of a ledger, private to its user; return its descriptor.

    Raises:
      LedgerError: the name is a symbolic link's, a pipe's or the like.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            what = "a symbolic link, which is not followed" if error.errno == errno.ELOOP else "no file"
            raise LedgerError(f"ledger {path.parent}: {path.name} is {what}") from error
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise LedgerError(f"ledger {path.parent}: {path.name} is no regular file")
    if flags & os.O_RDWR and found.st_mode & 0o077 and found.st_uid == os.geteuid():
        os.fchmod(fd, 0o600)  # it was made by an older version
    return fd


def _holder_of(fd: int, begun_by: str) -> str:
    """Return the processes that hold a lock: the one that took the lock, or those that were forked from it since."""
    wanted = os.fstat(fd)
    holders = set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = entry.stat()
        except OSError:  # it has gone, or belongs to another user
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino) and entry.parts[2] != str(os.getpid()):
            holders.add(entry.parts[2])
    if not holders or begun_by in holders:
        return f"process {begun_by or 'unknown'}"
    return f"process {', '.join(sorted(holders, key=int))}, forked from process {begun_by}, which took the lock"


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_at(path: Path, offset: int, length: int) -> bytes:
    """Return up to ``length`` bytes of a file from an offset."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb", buffering=0) as file:
        parts: list[bytes] = []
        file.seek(offset)
        while length and (part := file.read(length)):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)
