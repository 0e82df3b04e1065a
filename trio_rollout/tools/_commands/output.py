"""Buffers that keep a bounded part of a command's output and count the rest. Pure: no I/O.

Captured commands keep the head of each stream, and a fair share of both together. Exec sessions keep head and tail: the
beginning says what ran, the end how it went.
"""

from typing import final

import attrs


@final
@attrs.define(eq=False, repr=False)
class HeadBuffer:
    """Keeps the first ``limit`` bytes of a stream and counts the rest, so that the writer never waits."""

    limit: int
    _kept: bytearray = attrs.field(factory=bytearray, init=False)
    dropped: int = attrs.field(default=0, init=False)

    def append(self, chunk: bytes | bytearray) -> None:
        """Keep the part of ``chunk`` that fits."""
        room = max(0, self.limit - len(self._kept))
        self._kept += chunk[:room]
        self.dropped += max(0, len(chunk) - room)

    @property
    def kept(self) -> bytes:
        """The bytes that were kept."""
        return bytes(self._kept)


def aggregate(stdout: bytes, stderr: bytes, limit: int) -> bytes:
    """Return both streams, stdout first, in at most ``limit`` bytes.

    Over the limit stdout gets a third of it and stderr the rest, because errors say more. Room that stderr does not use
    goes back to stdout.
    """
    if len(stdout) + len(stderr) <= limit:
        return stdout + stderr
    for_stderr = min(len(stderr), limit - min(len(stdout), limit // 3))
    return stdout[: limit - for_stderr] + stderr[:for_stderr]


@final
@attrs.define(eq=False, repr=False)
class HeadTailBuffer:
    """Keeps at most ``limit`` bytes of a stream: the first half of the limit, and the newest bytes in the rest."""

    limit: int
    omitted: int = attrs.field(default=0, init=False)
    _head: bytearray = attrs.field(factory=bytearray, init=False)
    _tail: bytearray = attrs.field(factory=bytearray, init=False)

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def append(self, chunk: bytes | bytearray) -> None:
        """Add a chunk of the stream; the oldest bytes of the tail are dropped for it."""
        room = max(0, self.limit // 2 - len(self._head))
        self._head += chunk[:room]
        self._tail += chunk[room:]
        excess = len(self._tail) - (self.limit - self.limit // 2)
        if excess > 0:
            del self._tail[:excess]
            self.omitted += excess

    def drain_into(self, other: "HeadTailBuffer") -> bool:
        """Move everything to ``other``, as if ``other`` had received the stream itself; return False if there was nothing."""
        had = bool(len(self) or self.omitted)
        other.append(self._head)
        other.omitted += self.omitted
        other.append(self._tail)
        self._head.clear()
        self._tail.clear()
        self.omitted = 0
        return had

    def rendered(self) -> bytes:
        """Return head and tail, with a line between them that says how many bytes are missing."""
        if not self.omitted:
            return bytes(self._head + self._tail)
        return b"%b\n... %d bytes omitted ...\n%b" % (bytes(self._head), self.omitted, bytes(self._tail))

    @property
    def total(self) -> int:
        """The number of bytes that were written, kept or not."""
        return len(self) + self.omitted
