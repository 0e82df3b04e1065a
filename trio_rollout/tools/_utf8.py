"""Output cut into pieces for a display: no piece ends inside a code point, and no byte is lost. Pure."""

from collections.abc import Iterator
from typing import final

import attrs

_ASCII_END = 0x80
# From which lead byte on a sequence has how many bytes; what is above 4 is no UTF-8, and complete as it is.
_LEADS = ((0xF8, 1), (0xF0, 4), (0xE0, 3), (0xC0, 2))


def complete_length(data: bytes | bytearray) -> int:
    """How much of ``data`` does not end in the middle of a UTF-8 sequence. Bytes that are no UTF-8 are complete."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < _ASCII_END:
            break
        for lead, needed in _LEADS:
            if byte >= lead:  # does its sequence end within the data?
                return len(data) if back >= needed else len(data) - back
    return len(data)


@final
@attrs.define(eq=False, repr=False)
class Utf8Splitter:
    """Cuts a stream into pieces of at most ``limit`` (>= 4) bytes; waits for the rest of an incomplete code point."""

    limit: int
    _rest: bytearray = attrs.field(factory=bytearray, init=False)

    def feed(self, chunk: bytes | bytearray) -> Iterator[bytes]:
        """The pieces that are complete now."""
        self._rest += chunk
        while length := complete_length(self._rest[: self.limit]):
            yield bytes(self._rest[:length])
            del self._rest[:length]

    def flush(self) -> bytes:
        """What is left at the end of the stream, complete or not."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest
