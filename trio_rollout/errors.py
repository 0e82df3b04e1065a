"""Every exception that trio_rollout raises: one root, named by the boundary that failed.

A message says what was attempted, the limit and the actual value. All of them can be pickled: one positional message,
everything else keyword-only with a default.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core.values import GroupId, Turn


class RolloutError(Exception):
    """Root of all errors of this package."""


class SettingsError(RolloutError, ValueError):
    """A setting is out of its range; says which field, the value and what is allowed."""


class SourceError(RolloutError):
    """The prompts could not be read, or the source broke its contract."""


class ServerError(RolloutError):
    """An inference server answered with an error, with something that is no answer, or not at all."""


class RequestRejected(ServerError):
    """A request that no server will take (HTTP 4xx, or refused before sending); sending it again changes nothing."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ContextFull(RequestRejected):
    """The prompt alone fills the model's context: there is no room for one more token."""


class ServerBusy(ServerError):
    """The server refuses for now (408, 425, 429, 503): the same request may succeed later."""

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds that the server asked for, if it did."""


class ServerLost(ServerError):
    """The connection to the server broke, or it stopped answering: whether the request was executed is unknown."""

    def __init__(self, message: str, *, tokens: "Turn | None" = None) -> None:
        super().__init__(message)
        self.tokens = tokens
        """What a streamed answer had brought until then: a turn with stop ABORT."""


class RewardError(RolloutError):
    """A scorer failed, or returned what is no reward (None, NaN, another type, another number of them)."""


class GenerateError(RolloutError):
    """A generate function failed or returned what is no trajectory."""


class LedgerError(RolloutError):
    """The ledger could not be opened, belongs to another run, or a write to it failed."""


class DataRefused(LedgerError):
    """User data that the ledger can't store; says of which group, and where in it. The ledger itself goes on."""

    def __init__(self, message: str, *, group: "GroupId | None" = None) -> None:
        super().__init__(message)
        self.group = group
        """Whose data it is, where that is one group's."""


class SessionClosed(RolloutError):
    """A session was used after its close had begun."""


class ToolError(RolloutError):
    """A tool, command or sandbox could not be run at all (infrastructure, never the policy's fault)."""


class EndOfData(RolloutError):
    """The source has ended and every group has been delivered, filtered or quarantined."""


class EngineClosed(RolloutError):
    """The engine is closed or drained, and nothing deliverable is left."""
