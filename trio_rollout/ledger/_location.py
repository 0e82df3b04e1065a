"""The location of a body on disk: in the database, or in a segment file."""

import zlib
from typing import TypeAlias

import attrs


@attrs.frozen
class Inline:
    """The body is in the database."""

    data: bytes


@attrs.frozen
class InSegment:
    """The body is ``length`` bytes at ``offset`` of a segment file."""

    segment: int
    offset: int
    length: int
    crc: int

    def holds(self, data: bytes) -> bool:
        """Return True if these are the bytes that were written."""
        return len(data) == self.length and zlib.crc32(data) == self.crc


Location: TypeAlias = Inline | InSegment


def location_of(segment: int | None, start: int, length: int, crc: int, body: bytes | None) -> Location | None:
    """Return a body's location from its columns; None if the row has no body."""
    if segment is not None:
        return InSegment(segment, start, length, crc)
    return None if body is None else Inline(body)


def segment_columns(location: Location | None) -> tuple[int | None, int | None, int | None, int | None]:
    """Return the columns segment, start, length, crc."""
    if isinstance(location, InSegment):
        return location.segment, location.offset, location.length, location.crc
    return None, None, None, None
