"""The closed choices of the engine: how rollouts end, why they were stopped, how servers are paused."""

import enum
from typing import TYPE_CHECKING


class TableKey(enum.Enum):
    """An enumeration of states or events: each step of each group and sample looks into a table with two of them."""

    if not TYPE_CHECKING:  # checkers would take it for a method with another signature
        __hash__ = object.__hash__
        """That of ``enum.Enum`` is a function in Python; eleven calls of it cost a hundredth of a small rollout."""


class Status(enum.Enum):
    """The end of a rollout, as the trainer should see it."""

    COMPLETED = "completed"
    """The rollout ran to its end; tokens and reward are trainable."""
    TRUNCATED = "truncated"
    """The policy ran into a limit (tokens, context, a tool's time); trainable, the reward is kept."""
    ABORTED = "aborted"
    """The rollout was stopped from outside; never delivered for training."""
    FAILED = "failed"
    """The rollout failed for good; only an evaluation returns such a trajectory, with ``error`` set."""


class Stop(enum.Enum):
    """The reason why a server stopped sampling."""

    STOP = "stop"
    """An end token, a stop string or a stop id; its id is part of the output."""
    LENGTH = "length"
    """``max_new_tokens`` was reached."""
    ABORT = "abort"
    """The request was aborted; the tokens sampled until then are kept."""


class Cause(enum.Enum):
    """The reason why a try or an attempt ended without a result.

    A try that ended by DEADLINE, NO_PROGRESS or ERROR uses up one of the sample's ``Retry.max_attempts``. For the others
    ``Retry.max_free`` bounds the tries in a row without a new token.
    """

    DEADLINE = "deadline"
    """The deadline of the group, a rollout or a turn passed. Uses up an attempt."""
    NO_PROGRESS = "no_progress"
    """No new token, turn or tool output for too long. Uses up an attempt."""
    ERROR = "error"
    """User code, a server's answer or a scorer failed; type, message and traceback are kept. Uses up an attempt."""
    SIBLING = "sibling"
    """Another sample of the same group failed first. Never the cause of a whole group's settlement."""
    INFRASTRUCTURE = "infrastructure"
    """A sandbox, a tool, a judge or another machine that the sample needed has failed. Free."""
    SERVER_LOST = "server_lost"
    """The server that had the request died."""
    SERVER_ABORT = "server_abort"
    """A server aborted the request although this engine had not asked for it."""
    WEIGHT_UPDATE = "weight_update"
    """A weight update interrupted it."""
    STALE = "stale"
    """It grew older than the staleness bound allows."""
    CANCELLED = "cancelled"
    """It was cancelled from outside the engine."""
    SHUTDOWN = "shutdown"
    """The engine drained or closed."""

    @property
    def uses_attempt(self) -> bool:
        """True if a try that ended for this cause counts against ``Retry.max_attempts``."""
        return self in {Cause.DEADLINE, Cause.NO_PROGRESS, Cause.ERROR}


class PauseMode(enum.Enum):
    """The ways in which a paused SGLang server treats the requests that it is running."""

    ABORT = "abort"
    """They end at once with stop reason ABORT. The server aborts everything, other clients' requests too."""
    RETRACT = "retract"
    """They go back to the server's queue, lose their KV cache and go on after the resume."""
    IN_PLACE = "in_place"
    """They are frozen with their KV cache and go on after the resume; the cache can't be flushed meanwhile."""


class Resume(enum.Enum):
    """The parts of an unfinished group that are not sampled a second time."""

    SAMPLES = "samples"
    """Finished samples; a sample that begins anew samples every turn."""
    TURNS = "turns"
    """Finished turns too: a sample that begins anew gets them back, as long as it asks for the same."""


class Leftovers(enum.Enum):
    """The treatment of processes that a finished command, or a cancelled call of an exec session, leaves running."""

    KILL = "kill"
    """They are killed: a command's with its process group once its output is drained, a session's with the call."""
    KEEP = "keep"
    """They are handed to the rollout's scope and die with that."""


class CacheSalt(enum.Enum):
    """The part of a server's prefix cache that a request may use: requests of different salts share no prefix."""

    VERSION = "version"
    """The weight version that is current when the request is sent: no prefix that other weights computed is reused."""
    NONE = "none"
    """All of it, for servers whose cache is flushed at each weight update."""
