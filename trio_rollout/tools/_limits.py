"""Limits of captured commands and exec sessions, as one frozen value. Times are seconds, sizes are bytes.

The defaults are those of the reference behaviour (OpenAI Codex, unified exec). A loaded host may need a longer
``term_grace``. Captured commands and exec sessions share half of the limits, so that both use one class.
"""

import attrs

from .._core.checks import at_least, names_suggested, seconds, whole
from .._core.enums import Leftovers


@names_suggested
@attrs.frozen(kw_only=True)
class ExecLimits:
    """Limits of captured commands and exec sessions.

    Raises:
      SettingsError: a field is out of its range.
    """

    term_grace: float = attrs.field(default=0.05, converter=float, validator=at_least(0.0))
    """Time between SIGTERM and SIGKILL when a captured command is cancelled. Ends early when the leader exits."""
    io_drain: float = attrs.field(default=1.0, converter=float, validator=at_least(0.0))
    """Time to wait for the end of output after the leader has exited, for both streams together."""
    start: float = attrs.field(default=30.0, validator=seconds)
    """Time for the host to start a process of a rollout. A slower start is an infrastructure failure, not the command's."""
    teardown: float = attrs.field(default=10.0, validator=seconds)
    """Bound of every shielded kill-and-reap; a process that is left then is counted as unreaped. A teardown takes
    milliseconds, or seconds where ten processes wait for each core."""
    capture_bytes: int = attrs.field(default=1 << 20, validator=whole(0))
    """Bytes kept of each stream of a captured command, and of both streams together."""
    session_bytes: int = attrs.field(default=1 << 20, validator=whole(0))
    """Bytes kept of an exec session's output between two polls, and of its transcript: half head, half tail."""
    delta_bytes: int = attrs.field(default=8192, validator=whole(1))
    """Size of one read."""
    max_deltas: int = attrs.field(default=10_000, validator=whole(0))
    """Calls of ``on_chunk`` for each stream of a captured command. The capture continues after the last one."""
    min_yield: float = attrs.field(default=0.25, converter=float, validator=at_least(0.0))
    """Shortest wait for output of an exec session."""
    min_poll: float = attrs.field(default=5.0, converter=float, validator=at_least(0.0))
    """Shortest wait of a poll that writes nothing."""
    max_yield: float = attrs.field(default=30.0, validator=seconds)
    """Longest wait for output after a start or a write."""
    max_background: float = attrs.field(default=300.0, validator=seconds)
    """Longest wait of a poll that writes nothing."""
    early_exit: float = attrs.field(default=0.15, converter=float, validator=at_least(0.0))
    """An exec session's process that exits within this time of its start is never stored."""
    post_exit_close: float = attrs.field(default=0.05, converter=float, validator=at_least(0.0))
    """Time that a collection waits for the end of output once the process has exited."""
    trailing_output: float = attrs.field(default=0.1, converter=float, validator=at_least(0.0))
    """Time that the transcript waits for the end of output once the process has exited."""
    late_denial: float = attrs.field(default=0.1, converter=float, validator=at_least(0.0))
    """A denial within this time after an exit still counts."""
    post_write: float = attrs.field(default=0.1, converter=float, validator=at_least(0.0))
    """Pause between a write to a terminal and the poll that follows."""
    max_processes: int = attrs.field(default=64, validator=whole(1))
    """Stored exec sessions; and, counted separately, captured commands whose leftovers are kept."""
    protected: int = attrs.field(default=8, validator=whole(0))
    """Number of most recently used exec sessions that are never evicted."""
    max_output_tokens: int = attrs.field(default=10_000, validator=whole(1))
    """Most tokens of output in one response."""
    confirm_timeout: float = attrs.field(default=5.0, validator=seconds)
    """Time for a confirmed termination."""
    pty_rows: int = attrs.field(default=24, validator=whole(1))
    pty_cols: int = attrs.field(default=80, validator=whole(1))
    on_turn_cancel: Leftovers = Leftovers.KILL
    """The treatment of a stored exec session whose call is cancelled. ``KEEP``: the next turn can poll the session."""

    def output_tokens(self, asked: int | None) -> int:
        """Return the number of output tokens that a response shows: the requested number, within the limit."""
        return self.max_output_tokens if asked is None else min(max(0, asked), self.max_output_tokens)


DEFAULT_LIMITS = ExecLimits()
