"""Segment files: bodies in append-only files. The bodies that rows name are live, all other bytes are dead.

Owns the files and the count of live bytes in each. A file is renamed before it is deleted, so that a crash in between
leaves a name that means "dead". A reader with an outdated row finds no file, or bytes that fail the row's checksum.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import attrs

from ..errors import LedgerError
from ._disk import Disk
from ._location import InSegment

_LIVE, _DEAD = ".seg", ".dead"


def name_of(segment: int) -> str:
    """Return the file name of a segment."""
    return f"{segment:010d}{_LIVE}"


def number_of(name: str) -> int | None:
    """Return the segment of a file; None if it is no segment file."""
    stem = name.removesuffix(_LIVE)
    return int(stem) if name.endswith(_LIVE) and stem.isdecimal() else None


@attrs.define(eq=False)
class _File:
    size: int
    live: int = 0

    @property
    def dead(self) -> int:
        return self.size - self.live


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Segments:
    """The segment files of a ledger. A body that would take a file above ``max_bytes`` begins a new one."""

    disk: Disk
    max_bytes: int
    _next_number: int = attrs.field(default=0, init=False)
    _files: dict[int, _File] = attrs.field(factory=dict, init=False)
    _active: int | None = attrs.field(default=None, init=False)

    def open(self, named: Mapping[int, tuple[int, int]]) -> None:
        """Cut off and delete everything that no row names.

        ``named``: for each segment the end of its last body, and its live bytes.

        Raises:
          LedgerError: bytes that a row names are missing.
        """
        names = self.disk.names()
        for name in names:
            number = number_of(name)
            if number is not None and number not in named:
                self._delete(name)
            elif name.endswith(_DEAD) and number_of(name.removesuffix(_DEAD) + _LIVE) is not None:
                self.disk.delete(name)
        for number, (end, live) in sorted(named.items()):
            self._truncate(number, end, present=name_of(number) in names)
            self._files[number] = _File(end, live)
            self._active = number
        self._next_number = max(named, default=-1) + 1

    def _truncate(self, number: int, end: int, *, present: bool) -> None:
        name = name_of(number)
        size = self.disk.size(name) if present else 0
        if size < end:
            raise LedgerError(f"segment {name} has {size} bytes, the ledger needs {end} of them: the disk lost data")
        if size > end:
            self.disk.truncate(name, end)  # durable with the next body; until then the next open may do it again

    def append(self, bodies: Sequence[bytes]) -> list[InSegment]:
        """Write bodies one after the other and make them durable; return their locations."""
        total = sum(map(len, bodies))
        number = self._with_room(total)
        file = self._files[number]
        self.disk.write(name_of(number), file.size, bodies)
        self.disk.sync(name_of(number))
        if file.size == 0:
            self.disk.sync_names()
        locations = []
        for body in bodies:
            locations.append(InSegment(number, file.size, len(body), zlib.crc32(body)))
            file.size += len(body)
        return locations

    def _with_room(self, total: int) -> int:
        active = self._active
        if active is None or (self._files[active].size and self._files[active].size + total > self.max_bytes):
            active = self._active = self._next_number
            self._files[active] = _File(0)
            self._next_number += 1
        return active

    def read(self, location: InSegment) -> bytes:
        """Return a body.

        Raises:
          LedgerError: the bytes are not those that were written.
        """
        name = name_of(location.segment)
        data = self.disk.read(name, location.offset, location.length)
        if not location.holds(data):
            raise LedgerError(f"segment {name} is damaged: the body at {location.offset} fails its checksum")
        return data

    def apply_changes(self, changes: Iterable[tuple[int, int]]) -> None:
        """Count live bytes that rows took or dropped: pairs of segment and bytes."""
        for number, change in changes:
            self._files[number].live += change

    def next_to_compact(self) -> int | None:
        """Return the segment to empty next; None while the dead bytes are below the size of one segment."""
        empty = [number for number, file in self._files.items() if not file.live and number != self._active]
        if empty:
            return empty[0]
        if sum(file.dead for file in self._files.values()) <= self.max_bytes:
            return None
        return max(self._files, key=lambda number: self._files[number].dead)

    def seal(self, number: int) -> None:
        """Write no more bodies into this segment."""
        if number == self._active:
            self._active = None

    def delete(self, number: int) -> None:
        """Delete a segment that no row names."""
        if self._files[number].live:
            raise AssertionError(f"segment {number} has {self._files[number].live} live bytes")
        self._delete(name_of(number))
        del self._files[number]

    def _delete(self, name: str) -> None:
        dead = name.removesuffix(_LIVE) + _DEAD
        self.disk.rename(name, dead)
        self.disk.delete(dead)
