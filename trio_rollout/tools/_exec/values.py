"""The values and errors of exec sessions."""

import attrs

from ..._core.arrays import brief
from ...errors import RolloutError


def tokens_of(size: int) -> int:
    """Return the approximate number of tokens in so many bytes."""
    return -(-size // 4)


def middle_truncated(output: bytes, tokens: int) -> str:
    """Return the output as text, without its middle if it exceeds ``tokens``."""
    budget = tokens * 4
    if len(output) <= budget:
        return output.decode(errors="replace")
    head, tail = output[: budget // 2], output[len(output) - (budget - budget // 2) :]
    missing = tokens_of(len(output) - budget)
    return f"{head.decode(errors='ignore')}\n… {missing} tokens truncated …\n{tail.decode(errors='ignore')}"


@attrs.frozen(kw_only=True)
class ExecOutput:
    """The result of a session call: the output since the last call, and ``process_id`` (alive) or ``exit_code``.

    A ``process_id`` means that the process was alive when last looked at. That is a success, like any exit code.
    """

    call_id: str
    chunk_id: str
    wall_time: float
    output: bytes = attrs.field(repr=brief)
    omitted_bytes: int = 0
    process_id: int | None = None
    exit_code: int | None = None
    original_token_count: int = 0
    max_output_tokens: int = 10_000
    timed_out: bool = False
    """True in one-shot mode if the time limit ended the process; the exit code is 124."""
    success: None = None

    @property
    def alive(self) -> bool:
        """True while the process goes on."""
        return self.process_id is not None

    @property
    def success_for_logging(self) -> bool:
        """Always True: a command that failed was still run."""
        return True

    def model_text(self) -> str:
        """Return the text for the model."""
        lines = [f"Chunk ID: {self.chunk_id}", f"Wall time: {self.wall_time:.4f} seconds"]
        if self.exit_code is not None:
            lines.append(f"Process exited with code {self.exit_code}")
        if self.process_id is not None:
            lines.append(f"Process running with session ID {self.process_id}")
        lines += [f"Original token count: {self.original_token_count}", "Output:"]
        return "\n".join([*lines, middle_truncated(self.output, self.max_output_tokens)])


@attrs.frozen(kw_only=True)
class ExecSessionEnd:
    """The end of an exec session: exactly one for each process that was started.

    ``aggregated`` is the whole transcript, head and tail. ``failure`` is the message of a denial or of a lost supervisor; the
    exit code is -1 then. ``duration`` is in seconds.
    """

    call_id: str
    process_id: int
    command: tuple[str, ...]
    cwd: str
    exit_code: int
    aggregated: bytes = attrs.field(repr=brief)
    failure: str | None
    duration: float


@attrs.frozen(kw_only=True)
class ProcessInfo:
    """A living exec session, as ``ExecSessions.list_processes`` lists it. Times are on Trio's clock."""

    process_id: int
    call_id: str
    command: tuple[str, ...]
    cwd: str
    tty: bool
    started_at: float
    last_used: float


@attrs.frozen(kw_only=True)
class ExecStatistics:
    """The counts of ``ExecSessions.statistics``. ``unreaped``: processes whose death was not confirmed in time."""

    started: int
    stored: int
    alive: int
    evicted: int
    unreaped: int


class ExecError(RolloutError):
    """An error for the model to read: wrong use of a session, or a denial. Not a failure of the rollout."""


class ProcessFailed(ExecError):
    """The session was denied; the message is that of the first denial."""


class UnknownProcessId(ExecError):
    """No session has this id, or no longer."""

    def __init__(self, message: str, *, process_id: int | None = None) -> None:
        super().__init__(message)
        self.process_id = process_id


class StdinClosed(ExecError):
    """The session takes no input: it has no terminal, or its terminal accepts nothing."""


class ExecSessionsClosed(ExecError):
    """The exec sessions are closed, or are being closed."""
