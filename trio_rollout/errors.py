"""Every exception that trio_rollout raises: one root, and a class for each boundary that can fail.

A message says what was attempted, the limit and the actual value. Every exception can be pickled: it has one positional
message, and everything else is keyword-only with a default.

Inside a rollout the engine catches these errors and decides: it runs the group again or quarantines it
(``engine.quarantined()`` lists such groups with their last error). They reach your code from the call that you made: opening
something, ``next_batch``, ``evaluate``, ``weight_update``, ``ack``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core.values import Failure, GroupId, Trajectory, Turn


class RolloutError(Exception):
    """The root of all errors of this package. Catch it to tell them from errors of your own code."""


class SettingsError(RolloutError, ValueError):
    """A setting is out of its range; the message names the field, the value and the allowed range.

    Raised where settings are constructed or used first, such as by ``EngineSettings``, ``JsonlSource`` and
    ``load_tokenizer``. Correct the value; nothing has been started.
    """


class SettingsTypeError(SettingsError, TypeError):
    """A setting has a name that does not exist, or an argument is of another type; the message says what is allowed.

    Raised by the functions and classes that you call, at once. It is a TypeError as well, as Python's own errors of this kind
    are. Correct the call.
    """


class SourceError(RolloutError):
    """The prompts can't be read, or a source broke its contract.

    Raised by the sources of this package when a file is missing, has a bad line or has changed, and when a saved position
    belongs to other data; and by ``next_batch`` and ``evaluate`` when a source raised. Correct the data or the options; the
    message names the file and the line.
    """


class ServerError(RolloutError):
    """An inference server answered with an error or with an invalid answer, or not at all.

    Raised by ``open_sglang_servers`` when a server can't be used, by ``weight_update`` and the control calls of
    ``SGLangServers`` (the message names the servers), and by ``rollout.generate``, where the engine tries the group again.
    Read the server's log; the message quotes the server.
    """


class RequestRejected(ServerError):
    """No server accepts this request: HTTP 4xx, or refused before it was sent. Sending it again changes nothing.

    Raised by ``rollout.generate`` and ``SGLangServers.generate``: a token id outside the vocabulary, a prompt that is too
    long, messages without a tokenizer. The engine quarantines the group at once. Correct the prompt or the sampling
    parameters.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; None if the request was not sent."""


class ContextFull(RequestRejected):
    """The prompt alone fills the model's context: there is no room for one more token.

    Raised by ``rollout.generate``. An agent catches it to end its rollout with the turns it has; uncaught it is handled as
    ``RequestRejected``.
    """


class SamplingRejected(RequestRejected, SettingsError):
    """Sampling parameters have a value that no server of this model takes, such as a stop token outside the vocabulary.

    Raised by ``rollout.generate`` and ``SGLangServers.generate``, because the vocabulary is known only then. The engine
    quarantines the group at once. Correct the sampling parameters; the message names the field, the value and the range.
    """


class ServerBusy(ServerError):
    """A server refuses requests for now (408, 425, 429, 503); the same request may succeed later.

    Raised by single calls to a server. The client waits and tries again by itself; more servers or a smaller
    ``max_running`` make it rarer.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status."""
        self.retry_after = retry_after
        """Seconds that the server asked to wait; None if it did not say."""


class InfrastructureError(RolloutError):
    """A machine, service or sandbox that a rollout needs has failed: no fault of the policy's, nor of user code's.

    Raised by this package for lost servers, sandboxes and tools; raise it, or a subclass, from your generate function or
    scorer for infrastructure that is yours. The engine runs that sample again, alone, and counts nothing of
    ``Retry.max_attempts``; its siblings go on. ``Retry.infrastructure`` names classes of other packages that mean the same.
    """


class ServerLost(ServerError, InfrastructureError):
    """The connection to a server broke, or the server stopped answering. The request may have been executed.

    Raised by ``rollout.generate`` and ``open_tiny_process``. The engine runs the sample again on another server, without
    counting the attempt. Restart the server: it gets work again once it answers and has the required
    weights.
    """

    def __init__(self, message: str, *, tokens: "Turn | None" = None) -> None:
        super().__init__(message)
        self.tokens = tokens
        """The part of a streamed answer that had arrived: a turn with stop ABORT."""


class FailedElsewhere(RolloutError):
    """A try failed on another machine, whose engine has judged it. The engine here counts it as that one did.

    Raised by generate functions and group rewards that hand their work to another engine, such as those of the lease
    service of a Ray cluster. Without a ``failure`` it is an error of user code.
    """

    def __init__(
        self,
        message: str,
        *,
        failure: "Failure | None" = None,
        unscored: "Trajectory | None" = None,
        permanent: bool = False,
    ) -> None:
        super().__init__(message)
        self.failure = failure
        """The failure there: cause, class, message and traceback are kept."""
        self.unscored = unscored
        """The trajectory, if only its reward is missing: its tokens are kept, and the next try only scores it."""
        self.permanent = permanent
        """No other try can end differently: no server takes the input, or the scorer has failed for good."""


class RewardError(RolloutError):
    """A scorer failed, or returned no valid reward: None, NaN, another type, or another number of rewards.

    Raised by the stock scorers and by scorers in threads and processes. The engine asks the scorer again, as ``Retry`` says,
    but not if it fails twice in the same way. Correct the scorer; the last error of a quarantined group has its traceback.
    """

    def __init__(self, message: str, *, raised: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.raised = raised
        """The classes of the exception that this error stands for, as "module.Class", the exception's class first.

        Empty if it stands for none. An exception of a scorer's process can't come out as itself, nor can one that would end
        more than its call, such as SystemExit.
        """


class GenerateError(RolloutError):
    """A generate function failed, returned no valid trajectory, or used its rollout wrongly.

    Raised by ``rollout.finish`` without a turn, by ``rollout.generate`` and the like after the function has returned, by
    ``rollout.session`` without a gateway, and by ``session.trajectory`` if the agent got no answer. The engine tries the
    group again. Correct the function.
    """


class LedgerError(RolloutError):
    """The ledger can't be opened, belongs to another run, or could not write.

    Raised by ``open_ledger``, ``read_ledger`` and ``open_rollout_engine``; after a failed write by ``next_batch`` and
    ``ack``. After a failed write nothing more is written: correct the cause, such as a full disk, and start the run again. It
    resumes from the ledger.
    """


class DataRefused(LedgerError):
    """User data that the ledger can't store; the message names the group and the place in its data.

    Raised for a prompt, a trajectory's metadata or a reward with an object that JSON does not know. Only this write is
    refused; the ledger stays usable. Attach JSON values, numpy numbers or numeric arrays instead.
    """

    def __init__(self, message: str, *, group: "GroupId | None" = None) -> None:
        super().__init__(message)
        self.group = group
        """The group with that data; None if the data belongs to no group."""


class SessionClosed(RolloutError):
    """An agent's session is closed, or is being closed.

    Raised by the gateway for a request that comes too late; the agent gets HTTP 503 and is told not to try again. End the
    agent before its ``rollout.session()`` block is left.
    """


class ToolError(InfrastructureError):
    """A tool, a command or a sandbox could not be run at all. An infrastructure failure, never the policy's.

    Raised by ``trio_rollout.tools`` and its sandboxes; a command that fails or takes too long is a result and no error. The
    engine tries the group again. Correct the environment of the tools.
    """


class SandboxLost(InfrastructureError):
    """A sandbox is gone, or no longer answers.

    Raised by providers of sandboxes. The engine runs the sample again, alone, in a fresh sandbox.
    """


class EndOfData(RolloutError):
    """The source has ended, and every group has been delivered, filtered or quarantined.

    Raised by ``next_batch``. The run is complete. ``batches`` ends its loop instead, unless no group was delivered and some
    were quarantined: a loop that never ran would be silent about that, so it raises a RolloutError.
    """

    def __init__(self, message: str, *, delivered: int = 0, quarantined: int = 0) -> None:
        super().__init__(message)
        self.delivered = delivered
        """The number of groups that were delivered, acked ones included; with a ledger since its beginning."""
        self.quarantined = quarantined
        """The number of groups that were quarantined, counted in the same way."""


class EngineClosed(RolloutError):
    """The engine is closed or drained, and there is no group left to deliver.

    Raised by ``next_batch``, ``evaluate`` and the other calls of an engine after ``drain``, or after its block was left.
    Stop asking; open the engine again to go on.
    """
