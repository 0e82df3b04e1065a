"""What a captured command leaves: how it ended, and its output. A value.

Output kept head and tail: the beginning says what ran, the end how it went; the middle is counted. Pure.

How much of a captured command's output is kept: the head of each stream, and a fair share of both together. Pure.
"""

from typing import final

import attrs

from .expiration import StopKind


@attrs.frozen(kw_only=True)
class Captured:
    """How a command ended, and its output.

    ``exit_code`` is 124 after a timeout and 1 after a cancel event; a command may return these by itself, so ``stop``
    and ``timed_out`` tell. ``aggregated`` is stdout, then stderr. A stream is not ``complete`` when something still held it
    open at the end of the drain, or when more was written than is kept (``omitted_bytes``).
    """

    exit_code: int
    stop: StopKind
    signal: int | None
    stdout: bytes
    stderr: bytes
    aggregated: bytes
    duration: float
    stdout_complete: bool = True
    stderr_complete: bool = True
    omitted_bytes: int = 0
    unreaped: bool = False
    """Whether the proof that everything is dead did not come in time."""

    @property
    def timed_out(self) -> bool:
        """Whether its own time limit ended it: an observation for the model, not a failure of the rollout."""
        return self.stop is StopKind.TIMED_OUT

    @property
    def stdout_text(self) -> str:
        """Stdout as UTF-8; bytes that are none are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def stderr_text(self) -> str:
        """Stderr as UTF-8; bytes that are none are replaced."""
        return self.stderr.decode(errors="replace")

    def model_text(self) -> str:
        """What the model is shown: both streams, after a line about the timeout if there was one."""
        text = self.aggregated.decode(errors="replace")
        if not (self.stdout_complete and self.stderr_complete):
            text += f"\n[capture stopped: {self.omitted_bytes} bytes omitted, or a process still held the output open]"
        if self.timed_out:
            text = f"command timed out after {round(self.duration * 1000)} milliseconds\n{text}"
        return text


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


@final
@attrs.define(eq=False, repr=False)
class HeadBuffer:
    """Keeps the first ``limit`` bytes (None: all) and counts the rest; never makes the writer wait."""

    limit: int | None
    _kept: bytearray = attrs.field(factory=bytearray, init=False)
    dropped: int = attrs.field(default=0, init=False)

    def append(self, chunk: bytes | bytearray) -> None:
        """Take what fits."""
        room = len(chunk) if self.limit is None else max(0, self.limit - len(self._kept))
        self._kept += chunk[:room]
        self.dropped += max(0, len(chunk) - room)

    @property
    def kept(self) -> bytes:
        """What was kept."""
        return bytes(self._kept)


def aggregate(stdout: bytes, stderr: bytes, limit: int | None) -> bytes:
    """Both streams, stdout first, in at most ``limit`` bytes.

    Over the limit stdout gets a third of it and stderr the rest, because errors say more; room that stderr does not use
    goes back to stdout.
    """
    if limit is None or len(stdout) + len(stderr) <= limit:
        return stdout + stderr
    for_stderr = min(len(stderr), limit - min(len(stdout), limit // 3))
    return stdout[: limit - for_stderr] + stderr[:for_stderr]
