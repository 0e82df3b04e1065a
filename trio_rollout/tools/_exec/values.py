"""The values of exec sessions: what a call returns, what is listed, what listeners are told, what goes wrong."""

from collections.abc import Callable
from typing import TypeAlias

import attrs

from ...errors import RolloutError
from .._errors import SpawnError


def tokens_of(size: int) -> int:
    """About how many tokens so many bytes are."""
    return -(-size // 4)


def middle_truncated(output: bytes, tokens: int) -> str:
    """The output as text, without its middle where it exceeds ``tokens``."""
    budget = tokens * 4
    if len(output) <= budget:
        return output.decode(errors="replace")
    head, tail = output[: budget // 2], output[len(output) - (budget - budget // 2) :]
    missing = tokens_of(len(output) - budget)
    return f"{head.decode(errors='ignore')}\n… {missing} tokens truncated …\n{tail.decode(errors='ignore')}"


@attrs.frozen(kw_only=True)
class ExecOutput:
    """What a session call saw: output since the last one, and either ``process_id`` (alive) or ``exit_code``.

    A ``process_id`` means that the process was alive when last looked at. That is a success, like any exit code.
    """

    call_id: str
    chunk_id: str
    wall_time: float
    output: bytes
    omitted_bytes: int = 0
    process_id: int | None = None
    exit_code: int | None = None
    original_token_count: int = 0
    max_output_tokens: int = 10_000
    timed_out: bool = False
    """Only in one-shot mode: its time limit ended it; the exit code is 124."""
    success: None = None

    @property
    def alive(self) -> bool:
        """Whether the process goes on."""
        return self.process_id is not None

    @property
    def success_for_logging(self) -> bool:
        """Always: a command that failed was still run."""
        return True

    def log_preview(self) -> str:
        """The beginning of the output."""
        return self.output[:200].decode(errors="replace")

    def model_text(self) -> str:
        """What the model reads."""
        lines = [f"Chunk ID: {self.chunk_id}", f"Wall time: {self.wall_time:.4f} seconds"]
        if self.exit_code is not None:
            lines.append(f"Process exited with code {self.exit_code}")
        if self.process_id is not None:
            lines.append(f"Process running with session ID {self.process_id}")
        lines += [f"Original token count: {self.original_token_count}", "Output:"]
        return "\n".join([*lines, middle_truncated(self.output, self.max_output_tokens)])


@attrs.frozen(kw_only=True)
class ProcessInfo:
    """A living session. Times are on Trio's clock."""

    process_id: int
    call_id: str
    command: tuple[str, ...]
    cwd: str
    tty: bool
    started_at: float
    last_used: float


@attrs.frozen(kw_only=True)
class ExecStatistics:
    """Counts of one set of sessions. ``unreaped``: processes whose death was not proven in time."""

    started: int
    stored: int
    alive: int
    evicted: int
    unreaped: int


@attrs.frozen(kw_only=True)
class CommandBegin:
    """A session's process has started."""

    call_id: str
    process_id: int
    command: tuple[str, ...]
    cwd: str


@attrs.frozen(kw_only=True)
class OutputDelta:
    """A piece of its output; never ends inside a code point, unless the stream does."""

    call_id: str
    process_id: int
    chunk: bytes


@attrs.frozen(kw_only=True)
class CommandEnd:
    """It is over. Exactly one for each ``CommandBegin``. ``failure`` is a denial's message, with exit code -1."""

    call_id: str
    process_id: int
    exit_code: int
    aggregated: bytes
    failure: str | None = None
    duration: float = 0.0


@attrs.frozen(kw_only=True)
class TerminalInteraction:
    """Something was written to it, or it was polled and still runs. ``call_id`` is that of its start."""

    call_id: str
    process_id: int
    text: str


SessionEvent: TypeAlias = CommandBegin | OutputDelta | CommandEnd | TerminalInteraction
SessionListener: TypeAlias = Callable[[SessionEvent], None]
"""Told of events synchronously; must not block. Its errors are logged and change nothing."""


class ExecError(RolloutError):
    """A session call that the model should read about: wrong use, or a denial. Not a failure of the rollout."""


class CreateProcessError(SpawnError):
    """A session's process could not be started."""


class ProcessFailed(ExecError):
    """The session was denied; the message is the first one given."""


class UnknownProcessId(ExecError):
    """There is no such session (any more)."""

    def __init__(self, message: str, *, process_id: int | None = None) -> None:
        super().__init__(message)
        self.process_id = process_id


class StdinClosed(ExecError):
    """Input for a session that has no terminal."""


class WriteToStdinError(ExecError):
    """A session's terminal does not take the input."""


class ExecSessionsClosed(ExecError):
    """The sessions are closed, or are being closed."""
