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
