"""Output kept head and tail: the beginning says what ran, the end how it went; the middle is counted. Pure."""

from typing import final

import attrs


@final
@attrs.define(eq=False, repr=False)
class HeadTailBuffer:
    """Keeps at most ``limit`` bytes of a stream: the first half of it, and the newest bytes in the rest."""

    limit: int
    omitted: int = attrs.field(default=0, init=False)
    _head: bytearray = attrs.field(factory=bytearray, init=False)
    _tail: bytearray = attrs.field(factory=bytearray, init=False)

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def append(self, chunk: bytes | bytearray) -> None:
        """Take more of the stream; what no longer fits falls out of the tail's front."""
        room = max(0, self.limit // 2 - len(self._head))
        self._head += chunk[:room]
        self._tail += chunk[room:]
        excess = len(self._tail) - (self.limit - self.limit // 2)
        if excess > 0:
            del self._tail[:excess]
            self.omitted += excess

    def drain_into(self, other: "HeadTailBuffer") -> bool:
        """Move everything to ``other``, as if that had had the stream itself; False if there was nothing."""
        had = bool(len(self) or self.omitted)
        other.append(self._head)
        other.omitted += self.omitted
        other.append(self._tail)
        self._head.clear()
        self._tail.clear()
        self.omitted = 0
        return had

    def rendered(self) -> bytes:
        """Head and tail, with a line between them that says how much is missing."""
        if not self.omitted:
            return bytes(self._head + self._tail)
        return b"%b\n... %d bytes omitted ...\n%b" % (bytes(self._head), self.omitted, bytes(self._tail))

    @property
    def total(self) -> int:
        """How many bytes there were, kept or not."""
        return len(self) + self.omitted
