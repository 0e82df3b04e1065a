"""The numbers of tool execution, as one frozen value. Times are seconds, sizes bytes.

The defaults are those of the reference behaviour (OpenAI Codex, unified exec); a loaded host may want a longer
``term_grace``. They live together because the stops of captured commands and of sessions share half of them.
"""

import enum

import attrs

from .._core.checks import at_least, seconds, whole


class OnTurnCancel(enum.Enum):
    """What a cancelled turn means for a session process that is already stored."""

    DIE = "die"
    """It is terminated with the call. The default inside rollouts: nobody would come back for it."""
    KEEP = "keep"
    """It goes on and can be polled by the next turn; it dies with the rollout's scope."""


@attrs.frozen(kw_only=True)
class ExecLimits:
    """Limits of captured commands and exec sessions.

    Raises:
      SettingsError: a field is out of its range.

    """

    term_grace: float = attrs.field(default=0.05, converter=float, validator=at_least(0.0))
    """From SIGTERM to SIGKILL when a captured command is cancelled; ends early when the leader exits."""
    io_drain: float = attrs.field(default=2.0, converter=float, validator=at_least(0.0))
    """How long output is awaited after the leader has exited, for both streams together."""
    start: float = attrs.field(default=30.0, validator=seconds)
    """How long the host may take to start a process of a rollout; beyond it, that is the host's trouble, not the command's."""
    teardown: float = attrs.field(default=10.0, validator=seconds)
    """Bound of every shielded kill-and-reap; what is left then is counted as unreaped. It takes milliseconds, but seconds
    where ten processes wait for each core."""
    capture_bytes: int = attrs.field(default=1 << 20, validator=whole(0))
    """Kept of each stream of a captured command, and of both together."""
    session_bytes: int = attrs.field(default=1 << 20, validator=whole(0))
    """Kept of a session's output between two polls, and of its transcript: half head, half tail."""
    delta_bytes: int = attrs.field(default=8192, validator=whole(4))
    """Longest output event, and size of one read. 4 is the longest UTF-8 sequence."""
    max_deltas: int = attrs.field(default=10_000, validator=whole(0))
    """Output events of one call; the capture goes on beyond them."""
    min_yield: float = attrs.field(default=0.25, converter=float, validator=at_least(0.0))
    min_poll: float = attrs.field(default=5.0, converter=float, validator=at_least(0.0))
    """Shortest wait of a poll that writes nothing."""
    max_yield: float = attrs.field(default=30.0, validator=seconds)
    max_background: float = attrs.field(default=300.0, validator=seconds)
    """Longest wait of a poll that writes nothing."""
    early_exit: float = attrs.field(default=0.15, converter=float, validator=at_least(0.0))
    """A process that exits within this time of its start is never stored."""
    post_exit_close: float = attrs.field(default=0.05, converter=float, validator=at_least(0.0))
    """How long a collection waits for the end of output once the process has exited."""
    trailing_output: float = attrs.field(default=0.1, converter=float, validator=at_least(0.0))
    """The same for the transcript."""
    late_denial: float = attrs.field(default=0.1, converter=float, validator=at_least(0.0))
    """A denial that comes so soon after an exit still counts."""
    post_write: float = attrs.field(default=0.1, converter=float, validator=at_least(0.0))
    """Pause between a write to a terminal and the poll that follows it."""
    max_processes: int = attrs.field(default=64, validator=whole(1))
    """Stored sessions; and, counted apart, captured commands whose leftovers are kept."""
    protected: int = attrs.field(default=8, validator=whole(0))
    """So many of the most recently used processes are never evicted."""
    max_output_tokens: int = attrs.field(default=10_000, validator=whole(1))
    confirm_timeout: float = attrs.field(default=5.0, validator=seconds)
    """How long a confirmed termination may take."""
    pty_rows: int = attrs.field(default=24, validator=whole(1))
    pty_cols: int = attrs.field(default=80, validator=whole(1))
    on_turn_cancel: OnTurnCancel = OnTurnCancel.DIE

    def output_tokens(self, asked: int | None) -> int:
        """How many tokens of output a response shows: what is asked, within the limit."""
        return self.max_output_tokens if asked is None else min(max(0, asked), self.max_output_tokens)


DEFAULT_LIMITS = ExecLimits()
