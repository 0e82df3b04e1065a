"""Segment files: bodies, one behind the other, in append-only files. What is alive in them is what the rows name.

Owns the files and the count of live bytes in each. A file is renamed before it is deleted, so that a crash in between
leaves a name that means "dead". A reader with an old row finds no file, or bytes that fail the row's checksum.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import attrs

from ..errors import LedgerError
from ._disk import Disk
from ._place import InSegment

_LIVE, _DEAD = ".seg", ".dead"


def name_of(segment: int) -> str:
    """The file of a segment."""
    return f"{segment:010d}{_LIVE}"


def number_of(name: str) -> int | None:
    """The segment of a file; None if the file is none."""
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
    """The segment files of a ledger. ``roll`` is the size above which a new one is begun."""

    disk: Disk
    roll: int
    next_number: int = attrs.field(default=0, init=False)
    _files: dict[int, _File] = attrs.field(factory=dict, init=False)
    _active: int | None = attrs.field(default=None, init=False)

    def open(self, named: Mapping[int, tuple[int, int]]) -> None:
        """Cut and delete what no row names. ``named``: for each segment the end of its last body, and its live bytes.

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
            self._cut(number, end, present=name_of(number) in names)
            self._files[number] = _File(end, live)
            self._active = number
        self.next_number = max(named, default=-1) + 1

    def _cut(self, number: int, end: int, *, present: bool) -> None:
        name = name_of(number)
        size = self.disk.size(name) if present else 0
        if size < end:
            raise LedgerError(f"segment {name} has {size} bytes, the ledger needs {end} of it: the disk lost data")
        if size > end:
            self.disk.truncate(name, end)  # durable with the next body, and until then it may be cut again

    def append(self, bodies: Sequence[bytes]) -> list[InSegment]:
        """Write bodies behind each other and make them durable."""
        total = sum(map(len, bodies))
        number = self._with_room(total)
        file = self._files[number]
        self.disk.write(name_of(number), file.size, bodies)
        self.disk.sync(name_of(number))
        if file.size == 0:
            self.disk.sync_names()
        places = []
        for body in bodies:
            places.append(InSegment(number, file.size, len(body), zlib.crc32(body)))
            file.size += len(body)
        return places

    def _with_room(self, total: int) -> int:
        active = self._active
        if active is None or (self._files[active].size and self._files[active].size + total > self.roll):
            active = self._active = self.next_number
            self._files[active] = _File(0)
            self.next_number += 1
        return active

    def read(self, place: InSegment) -> bytes:
        """A body.

        Raises:
          LedgerError: it is not the one that was written.

        """
        name = name_of(place.segment)
        data = self.disk.read(name, place.offset, place.length)
        if not place.holds(data):
            raise LedgerError(f"segment {name} is damaged: the body at {place.offset} fails its checksum")
        return data

    def account(self, moves: Iterable[tuple[int, int]]) -> None:
        """Rows took or dropped so many bytes of a segment."""
        for number, change in moves:
            self._files[number].live += change

    def victim(self) -> int | None:
        """The segment to empty next, so that dead bytes stay below one segment; None if all is well."""
        empty = [number for number, file in self._files.items() if not file.live and number != self._active]
        if empty:
            return empty[0]
        if sum(file.dead for file in self._files.values()) <= self.roll:
            return None
        return max(self._files, key=lambda number: self._files[number].dead)

    def seal(self, number: int) -> None:
        """Write nothing more into this segment."""
        if number == self._active:
            self._active = None

    def retire(self, number: int) -> None:
        """Delete a segment that no row names."""
        if self._files[number].live:
            raise AssertionError(f"segment {number} has {self._files[number].live} live bytes")
        self._delete(name_of(number))
        del self._files[number]

    def _delete(self, name: str) -> None:
        dead = name.removesuffix(_LIVE) + _DEAD
        self.disk.rename(name, dead)
        self.disk.delete(dead)

    @property
    def dead_bytes(self) -> int:
        """Bytes that no row names."""
        return sum(file.dead for file in self._files.values())
