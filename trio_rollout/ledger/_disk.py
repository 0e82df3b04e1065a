"""The disk as the ledger uses it: a directory with segment files, a database and a lock. A simulation has its own disk.

Every call blocks, and is made from one worker thread at a time.
"""

import fcntl
import itertools
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, final

import apsw
import attrs

from ..errors import LedgerError

DATABASE = "ledger.db"
_LOCK = "lock"
_PARTS = 1024  # IOV_MAX on Linux and macOS


class Disk(Protocol):
    """A directory. Names are file names in it; nothing is durable before ``sync`` or ``sync_names``."""

    def connect(self) -> apsw.Connection:
        """Open the database for writing; create it if it does not exist."""
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
            self._open[name] = os.open(self.path / name, os.O_RDWR | os.O_CREAT, 0o644)
        return self._open[name]

    def _close_all(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def connect(self) -> apsw.Connection:
        return apsw.Connection(os.fspath(self.path / DATABASE))

    def lock(self) -> None:
        _make_durably(self.path)
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise LedgerError(
                f"ledger {self.path} is in use by process {holder}: stop that run, or use another directory"
            ) from None
        except OSError:
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
        return (self.path / name).stat().st_size

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


def _make_durably(path: Path) -> None:
    """Create a directory and its parents so that they survive a power cut."""
    if not path.is_dir():
        _make_durably(path.parent)
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_at(path: Path, offset: int, length: int) -> bytes:
    """Return up to ``length`` bytes of a file from an offset."""
    with path.open("rb", buffering=0) as file:
        parts: list[bytes] = []
        file.seek(offset)
        while length and (part := file.read(length)):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)
