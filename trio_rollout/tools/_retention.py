"""How much of a captured command's output is kept: the head of each stream, and a fair share of both together. Pure."""

from typing import final

import attrs


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
