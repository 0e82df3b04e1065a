"""Where a body lies: in the database, or in a segment file."""

import zlib

import attrs


@attrs.frozen
class Inline:
    """The body is in the database."""

    data: bytes

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return len(self.data)


@attrs.frozen
class InSegment:
    """The body is ``length`` bytes at ``offset`` of a segment file."""

    segment: int
    offset: int
    length: int
    crc: int

    @property
    def end(self) -> int:
        """Offset behind the body."""
        return self.offset + self.length

    def holds(self, data: bytes) -> bool:
        """Whether these are the bytes that were written."""
        return len(data) == self.length and zlib.crc32(data) == self.crc


Place = Inline | InSegment
