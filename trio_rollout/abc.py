"""The protocols that users implement: sources, generate functions, scorers, filters, servers, gateways and ledgers.

Every method is called by the engine, in a task of the Trio run that opened it, never from another thread. For each
protocol its docstring says when that is, what an exception counts as, and what a cancellation has to leave behind. An
``async`` method may block; it is cancelled by Trio's rules and must let ``trio.Cancelled`` through. All others must
return at once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy.typing as npt

from ._core.arrays import IdArray
from ._core.enums import PauseMode, Status
from ._core.events import (
    BatchAcked,
    BatchDelivered,
    Event,
    GroupFiltered,
    GroupQuarantined,
    GroupReady,
    GroupRequeued,
    GroupStarted,
    GroupStarved,
    SampleFinished,
    SampleRetried,
    ServersStayedPaused,
    TurnFinished,
    VersionNoted,
    WindowClosed,
    WindowOpened,
)
from ._core.ledger_events import LedgerEvent, Recovered, RunIdentity
from ._core.sampling import SamplingParams
from ._core.settings import Deadlines
from ._core.statistics import ServerStatistics
from ._core.values import Drop, Group, Keep, Prompt, Trajectory, Turn

if TYPE_CHECKING:
    from .tools import RolloutTools

ModelInput: TypeAlias = Sequence[int] | npt.NDArray[Any] | str
"""A prompt as servers take it: token ids, or text that the server itself turns into ids."""

OnTokens: TypeAlias = Callable[[Sequence[int]], None]
"""Is called with all ids that were sampled so far, whenever there are more. Must not block or raise."""


class Source(Protocol):
    """Gives the engine its prompts.

    One task of the engine calls ``take``, ``state`` and ``give_back``, one at a time. An exception of any of them is the
    source's fault and ends the run: ``next_batch`` raises it, as SourceError unless it is one. An evaluation calls only
    ``take``, and raises the exception as it is.

    Two optional members are used where a source has them. ``async check()`` is awaited before a run begins, so that bad
    input is found before any work is done. ``identity``, a string, is kept in the ledger, which then refuses a source
    with another identity; without it the name of the class is used.
    """

    async def take(self, count: int) -> Sequence[Prompt]:
        """Return up to ``count`` prompts; none means the end of the data.

        Called whenever rollouts can be started. May block until there is a prompt; the drain cancels it. Cancelled, it
        must have taken nothing. After an empty answer it is called again only after a ``give_back``.
        """
        ...

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Accept prompts that were taken and not finished; later calls of ``take`` return them first.

        Called once, by a drain without a ledger (a ledger keeps unfinished prompts itself), within ``Deadlines.drain``.
        Cancelled, it must have accepted nothing.
        """

    def state(self) -> dict[str, object]:
        """Return the position as data that JSON can express; ``restore`` continues right behind the last ``take``.

        Called after each ``take`` of a run with a ledger, and written in the same transaction as the prompts.
        """
        ...

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a position that ``state`` returned. Called before the first ``take``, if the ledger has one.

        Raises:
          SourceError: the position is of other data.
        """


class Session(Protocol):
    """An agent's access to the model: requests to ``base_url`` with ``api_key`` become turns of the rollout.

    ``rollout.session()`` opens one; the generate function that opened it uses it.
    """

    id: str
    """Unguessable, and never used twice."""
    base_url: str
    """The value for ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL`` alike."""
    api_key: str
    """Opens this session only."""

    async def close(self) -> None:
        """Refuse new turns, let running ones finish within the drain time, then cancel the rest.

        Leaving the session's block calls it. Blocks until no turn runs; a second call waits for the first. Cancelled, running
        turns are cancelled at once, and the session is closed all the same.
        """

    def trajectory(self, *, status: Status | None = None) -> Trajectory:
        """Return what was recorded. Call it after the session was closed."""
        ...


class Rollout(Protocol):
    """One execution of one prompt: a generate function's only access to servers, sessions and tools.

    The engine makes one for each call of the generate function; it can be used until that call returns. Generate
    functions may call its methods from several tasks at once.
    """

    @property
    def attempt(self) -> int:
        """Number of this attempt at the group, from 1."""
        ...

    @property
    def index(self) -> int:
        """Place of this rollout in its group, from 0."""
        ...

    @property
    def deadline(self) -> float:
        """The time at which this rollout is cancelled, on ``trio.current_time()``'s clock; ``inf`` for no deadline."""
        ...

    @property
    def weight_version(self) -> int:
        """The engine's newest weight version."""
        ...

    @property
    def new_tokens(self) -> int:
        """Number of tokens that this try has sampled so far."""
        ...

    def note_tokens(self, count: int) -> None:
        """Count tokens that the generate function has sampled without ``generate``, such as through another client.

        They enter ``statistics().tokens``, and a try that has sampled some does not count for ``Retry.max_free``.
        """
        ...

    @property
    def replaying(self) -> bool:
        """True while recorded turns are left that ``generate`` gives back, with ``EngineSettings(resume=Resume.TURNS)``.

        What followed such a turn happened in an earlier try, so code whose effects reach beyond the rollout can leave them
        out. It is False once the last recorded turn was given back: what followed that one may not have happened.
        """
        ...

    @property
    def input(self) -> ModelInput:
        """The prompt as servers take it: its ids, or its text or messages encoded by the tokenizer.

        Raises:
          RequestRejected: the prompt's fault; see ``InferenceServers.encode``.
        """
        ...

    async def generate(
        self,
        input_ids: ModelInput,
        sampling: SamplingParams | None = None,
        *,
        extra: Mapping[str, object] = {},
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """Sample one turn. Sampling: this call's, else the prompt's, else the generate function's.

        Blocks while a weight update is under way, then until the answer is complete, at most ``Deadlines.turn``. An
        interrupted turn raises nothing: the attempt is cancelled. Cancelled, the request is aborted on its server
        before Cancelled goes on, within ``Deadlines.abort``; the tokens sampled so far are lost.

        With ``EngineSettings(resume=Resume.TURNS)`` a request that an earlier try of the sample made returns the recorded
        turn, until the first request that differs in its ids, sampling or ``extra``.

        Raises:
          RequestRejected: the request's fault: no server accepts it.
          ServerError: the server's fault.
        """
        ...

    def session(self, *, sampling: SamplingParams | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a session for an agent that speaks OpenAI or Anthropic over HTTP. Needs the engine's ``gateway``."""
        ...

    @property
    def tools(self) -> "RolloutTools":
        """Commands, exec sessions and sandboxes. Their processes end, and are reaped, with the generate function."""
        ...

    def finish(self, turns: Sequence[Turn], *, status: Status | None = None) -> Trajectory:
        """Return the trajectory of these turns; the status follows the last turn's stop unless given."""
        ...


class Generate(Protocol):
    """Makes a trajectory of a prompt. An attribute ``sampling``, if there is one, is the default of its turns."""

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Run one rollout of ``prompt``.

        Called by the engine once for each sample of each attempt, many at a time; ``prompt`` is a copy that the function
        may change. May block up to the rollout's and the group's deadline. The attempt's end cancels it: what it then does
        in ``finally`` blocks is awaited, and its result is lost.

        An exception is the user's fault and uses up one of ``Retry.max_attempts``, and so does a result that is no
        finished trajectory. ServerLost is free; RequestRejected sets the group aside at once.
        """
        ...


class Reward(Protocol):
    """Scores one trajectory."""

    async def __call__(self, trajectory: Trajectory, /) -> float | Mapping[str, float]:
        """Return the reward, or several by name; finite numbers, numpy's included, and arrays or tensors of one element.

        The names must be the same for all samples of a group. Called by the engine after the generate function, many at a
        time, each call for at most ``Deadlines.reward``; the attempt's end cancels it. An exception of any class, a missed
        deadline and a value that is no finite number are the scorer's fault: it alone is called again,
        ``Retry.max_attempts`` times in all, but not after two failures alike. ``errors.InfrastructureError`` and what
        ``Retry.infrastructure`` names cost no try.
        """
        ...


class GroupReward(Protocol):
    """Scores a whole group at once."""

    async def __call__(self, group: Group, /) -> Sequence[float | Mapping[str, float]]:
        """Return one reward for each trajectory, in order: a sequence, or an array with one dimension.

        Called by the engine when all rollouts of a group are finished, before the filter; otherwise like ``Reward``.
        """
        ...


class GroupFilter(Protocol):
    """Decides if a finished group is worth training on."""

    async def __call__(self, group: Group, /) -> Keep | Drop:
        """Return Keep() or Drop(reason).

        Called by the engine when a group has its rewards; otherwise like ``Reward``.
        """
        ...


class InferenceServers(Protocol):
    """The servers as the engine uses them. ``SGLangServers`` implements it.

    ``under``, ``versions``, ``require_version`` and ``statistics`` are called while the engine is opened; then rollouts
    call ``encode`` and ``generate``, one task waits in ``blocked_reason_after``, and a weight update calls ``pause``,
    ``versions``, ``require_version`` and ``resume`` in this order. The servers outlive the engine.

    Servers that several engines share have an optional property ``required_version``: the version that was required last, or
    None. An engine that is opened starts at that version, and an update has to name one above it.
    """

    def under(self, deadlines: Deadlines) -> "InferenceServers":
        """Return the same servers, with these budgets for aborts and control calls. Called once, by the engine."""
        ...

    def encode(self, prompt: Prompt) -> ModelInput:
        """Return the prompt as ``generate`` takes it. Called by ``rollout.input``.

        Raises:
          RequestRejected: the prompt's fault: messages without a tokenizer, or an id outside the vocabulary.
        """
        ...

    async def generate(
        self,
        input_ids: ModelInput,
        sampling: SamplingParams,
        *,
        affinity: str | None = None,
        extra: Mapping[str, object] = {},
        on_progress: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Turn:
        """Sample one turn on one server. A turn aborted by others returns with stop ABORT and the tokens it has.

        Called by ``rollout.generate``, many at a time. Calls of equal ``affinity`` should go to the same server; ``extra``
        is sent as it is. With ``on_progress`` the answer is streamed, and ``on_progress()`` is called whenever new tokens
        have come. ``on_tokens`` is called with the tokens, as far as they are known before the answer is complete. Both
        must not block or raise.

        Blocks until the answer is complete. While every server is lost or busy it waits inside ``while_waiting()``, which
        stops the caller's clocks. Cancelled, the request is aborted on its server and its connection is reused or closed
        before Cancelled goes on, within the abort budget.

        Raises:
          RequestRejected: the request's fault: no server accepts it. The message has the servers' words.
          ServerLost: the server was lost with the request; ``tokens`` has what a stream had brought until then.
          ServerError: the server's fault, any other failure.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Pause every server. Called when a weight update begins; ``resume`` follows in any case.

        Blocks until none of them samples, within the control budget. Cancelled, some of them may be paused.

        Raises:
          trio.BusyResourceError: another engine has paused them. Nothing was done.
          ServerError: names the servers that could not be paused in time. They count as lost.
        """

    async def resume(self) -> None:
        """Resume every server that may have been paused, then send the aborts that are owed.

        Called at the end of a weight update, in a shielded scope that lasts for the control budget. Blocks until the servers
        sample again. Cancelled, it goes on in the background.

        Raises:
          ServerError: names the servers that could not be resumed. The weight update counts all the same.
        """

    async def versions(self) -> Mapping[str, int | None]:
        """Return the weight version that each usable server reports, by URL; None if it reports no number.

        Called when the engine is opened, and after the body of each weight update. Blocks until all have answered, within
        the control budget; a server that does not answer is left out. Cancelled, nothing has changed.
        """
        ...

    def require_version(self, version: int, *, named_by: Collection[str] = ()) -> None:
        """Send requests only to servers that report this version, or have never reported one.

        Called when the engine is opened, by each weight update, and by ``note_weight_version``. ``named_by``, given only when an
        engine is opened with the ledger of an earlier run: the servers that reported a number then. A server that reports none
        now must get no requests before a weight update: it has other weights.
        """

    async def blocked_reason_after(self, known: str | None) -> str | None:
        """Wait until the reason that blocks every request differs from ``known``, and return it; None: not blocked.

        Called in a loop as long as the engine runs; ``next_batch`` and ``evaluate`` raise ServerError with the reason. Servers
        are blocked when they answer, and none has the required version, or when an earlier run has left them paused: only a
        weight update ends that. Servers that are lost or busy are not, because they can come back. Cancelled, nothing has
        changed.
        """

    def statistics(self) -> ServerStatistics:
        """Return the counts of this moment. Called by ``engine.statistics()``."""
        ...


class ServerControl(Protocol):
    """Commands to all servers that the engine itself never sends; trainers and operators do. ``SGLangServers`` has them.

    Each blocks until every server has answered, within the control budget. Cancelled, some servers may have done it.
    """

    async def flush_cache(self) -> None:
        """Empty every server's prefix cache.

        Raises:
          ServerError: names the servers that did not.
        """

    async def abort_until_idle(self) -> None:
        """Abort every request on every server, other clients' too, until none runs.

        Raises:
          ServerError: names the servers that did not become idle.
        """

    async def health(self) -> Mapping[str, bool]:
        """Return for each server, by URL, if it answers that it is ready."""
        ...


class Gateway(Protocol):
    """Serves the sessions of agents over HTTP. ``trio_rollout.gateway.open_gateway`` gives one."""

    def open_session(
        self, rollout: Rollout, *, prompt: Prompt, sampling: SamplingParams
    ) -> AbstractAsyncContextManager[Session]:
        """Open a session whose turns are sampled by ``rollout.generate``. Called by ``rollout.session``.

        Entering and leaving are the session's beginning and its ``close``; an exception counts as the generate function's.
        """
        ...


class Ledger(Protocol):
    """The engine's durable memory. ``open_ledger`` gives one on disk.

    Two optional members keep a second engine away: ``claim()`` is called before ``begin`` and raises LedgerError while another
    engine has the ledger, ``release()`` when the engine that claimed it is over.
    """

    async def begin(self, identity: RunIdentity) -> Recovered:
        """Bind the ledger to a run and return what it remembers. Called once, when the engine is opened.

        Blocks until the ledger is read. Cancelled, nothing was written.

        Raises:
          LedgerError: it belongs to another run, is of a newer format, or is in use (by another engine, too). The engine is not
            opened.
        """
        ...

    async def record(self, events: Sequence[LedgerEvent]) -> None:
        """Write these events in one transaction.

        Called by many tasks at once, before the engine shows what the events say. Blocks until they are on disk. Cancelled
        before the write was accepted, nothing is written; later it waits for the write's end and returns normally.

        Raises:
          DataRefused: the user's fault: an event has data that cannot be stored. The ledger goes on.
          LedgerError: this write, or one before it, failed. Nothing of it counts as written, and the run ends.
        """


class Instrument(Protocol):
    """Is told of everything that happens in an engine.

    ``event`` is called in the task in which the thing happened, between two of its steps, so it must not block. An
    exception that it raises is logged, and the instrument gets no more events; the engine goes on.
    """

    def event(self, event: Event, /) -> None:
        """Take note of an event: one of the subclasses of ``Event``. Ignore those that are not known here."""


__all__ = [
    "BatchAcked",
    "BatchDelivered",
    "Drop",
    "Event",
    "Gateway",
    "Generate",
    "GroupFilter",
    "GroupFiltered",
    "GroupQuarantined",
    "GroupReady",
    "GroupRequeued",
    "GroupReward",
    "GroupStarted",
    "GroupStarved",
    "IdArray",
    "InferenceServers",
    "Instrument",
    "Keep",
    "Ledger",
    "ModelInput",
    "OnTokens",
    "Reward",
    "Rollout",
    "SampleFinished",
    "SampleRetried",
    "ServerControl",
    "ServersStayedPaused",
    "Session",
    "Source",
    "TurnFinished",
    "VersionNoted",
    "WindowClosed",
    "WindowOpened",
]
