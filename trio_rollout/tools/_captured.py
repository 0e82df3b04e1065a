"""What a captured command leaves: how it ended, and its output. A value."""

import attrs

from ._expiration import StopKind


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
