"""What users write: the protocols of sources, generate functions, scorers, filters, servers and ledgers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy.typing as npt

from ._core.arrays import IdArray
from ._core.enums import PauseMode, Status
from ._core.events import Event, Recovered, RunIdentity
from ._core.sampling import SamplingParams
from ._core.settings import Deadlines
from ._core.statistics import ServerStatistics
from ._core.values import Drop, Group, Keep, Prompt, Trajectory, Turn

if TYPE_CHECKING:
    from .tools import RolloutTools

ModelInput: TypeAlias = Sequence[int] | npt.NDArray[Any] | str
"""What a server takes as a prompt: token ids, or text that the server itself turns into ids."""

OnTokens: TypeAlias = Callable[[Sequence[int]], None]
"""Told of all ids that were sampled so far, whenever there are more. Called synchronously; must not block or raise."""


class Source(Protocol):
    """Where prompts come from. Called from one task at a time.

    Two things more are used where a source has them: ``async check()`` is awaited before a run begins, so that bad input
    costs no work; ``identity``, a string, is what a ledger knows it by: one of another identity is refused.
    """

    async def take(self, count: int) -> Sequence[Prompt]:
        """Up to ``count`` prompts; empty means end of data. Cancelled, it must have taken nothing."""
        ...

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Take back prompts that were never finished; the next ``take`` may return them."""
        ...

    def state(self) -> dict[str, object]:
        """The position as JSON-able data, such that ``restore`` continues behind the last ``take``."""
        ...

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a saved position; refuse with SourceError what is not one of this source."""
        ...


class Session(Protocol):
    """An agent's door to the model: what it asks at ``base_url`` with ``api_key`` becomes turns of the rollout."""

    id: str
    """Unguessable, and never used twice."""
    base_url: str
    """For ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL`` alike."""
    api_key: str
    """Of this session only."""

    async def close(self) -> None:
        """Refuse new turns, let running ones finish within the drain time, cancel the rest. Again: nothing happens."""
        ...

    def trajectory(self, *, status: Status | None = None) -> Trajectory:
        """What was recorded, after the session was closed."""
        ...


class Rollout(Protocol):
    """A generate function's only door to the outside: one execution of one prompt, inside its scopes."""

    @property
    def attempt(self) -> int:
        """Number of this try at the group, from 1."""
        ...

    @property
    def index(self) -> int:
        """Place of this rollout in its group, from 0."""
        ...

    @property
    def deadline(self) -> float:
        """When this rollout must be over, on ``trio.current_time()``'s clock; ``inf`` without a deadline."""
        ...

    @property
    def weight_version(self) -> int:
        """The engine's newest weight version."""
        ...

    @property
    def input(self) -> ModelInput:
        """The prompt as the servers take it: its ids, or its text or messages encoded by the tokenizer."""
        ...

    async def generate(
        self,
        input_ids: ModelInput,
        sampling: SamplingParams | None = None,
        *,
        extra: Mapping[str, object] = {},
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """Sample one turn. Sampling: this call's, else the prompt's, else the generate function's."""
        ...

    def session(self, *, sampling: SamplingParams | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a session for an agent that speaks OpenAI or Anthropic over HTTP; needs the engine's ``gateway``."""
        ...

    @property
    def tools(self) -> "RolloutTools":
        """Commands, exec sessions, sandboxes: what they start is dead and reaped when the generate function has ended."""
        ...

    def finish(self, turns: Sequence[Turn], *, status: Status | None = None) -> Trajectory:
        """The trajectory of these turns; the status follows the last turn's stop unless given."""
        ...


class Generate(Protocol):
    """Turns a prompt into a trajectory. May carry its own default in an attribute ``sampling``."""

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Run one rollout of ``prompt``."""
        ...


class Reward(Protocol):
    """Scores one trajectory."""

    async def __call__(self, trajectory: Trajectory, /) -> float | Mapping[str, float]:
        """The reward, or several by name."""
        ...


class GroupReward(Protocol):
    """Scores a whole group at once."""

    async def __call__(self, group: Group, /) -> Sequence[float | Mapping[str, float]]:
        """One reward for each trajectory, in order."""
        ...


class GroupFilter(Protocol):
    """Decides whether a finished group is worth training on."""

    async def __call__(self, group: Group, /) -> Keep | Drop:
        """Keep() or Drop(reason)."""
        ...


class InferenceServers(Protocol):
    """The servers as the engine sees them. ``SGLangServers`` implements it."""

    def under(self, deadlines: Deadlines) -> "InferenceServers":
        """The same servers, with these budgets for aborts and control calls."""
        ...

    def encode(self, prompt: Prompt) -> ModelInput:
        """The prompt as ``generate`` takes it.

        Raises:
          RequestRejected: no server could take it (messages without a tokenizer, an id outside the vocabulary).
        """
        ...

    async def generate(
        self,
        input_ids: ModelInput,
        sampling: SamplingParams,
        *,
        affinity: str | None = None,
        extra: Mapping[str, object] = {},
        moved: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Turn:
        """Sample one turn on one server; an aborted one returns with stop ABORT and the tokens it has.

        With ``moved`` the answer is streamed, and ``moved()`` is called whenever new tokens have come; what came before
        the server was lost is then in ``ServerLost.tokens``. ``on_tokens`` is told which tokens, as far as they are known
        before the answer is complete. It waits for a server that is not lost or busy inside ``waiting()``, where the
        caller's clocks stand still.
        Blocks until the answer is there; waits while no server is usable. Cancelled, the request is aborted on its
        server and its connection is reused or closed before Cancelled goes on, within the abort budget.

        Raises:
          RequestRejected: the servers' words for why no server will take this request.
          ServerLost: the server died with the request.
          ServerError: any other failure.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Pause every server. When it returns, none of them samples.

        Raises:
          ServerError: names the servers that could not be paused in time; they count as lost from then on.
        """
        ...

    async def resume(self) -> None:
        """Resume every server that may have been paused; then pay the aborts that are owed."""
        ...

    async def versions(self) -> Mapping[str, int | None]:
        """The weight version that each usable server names, by URL; None if it names no number."""
        ...

    def require_version(self, version: int) -> None:
        """From now on only servers that name this version get work (those that never named one excepted)."""
        ...

    async def obstacle_after(self, known: str | None) -> str | None:
        """Wait until what keeps every request from being sent is something else than ``known``, and return it.

        An obstacle is what only a weight update ends: servers answer, and none has the required version. Servers that are
        lost or busy are none, for they may come back. None: there is no obstacle. Cancelled, nothing has changed.
        """
        ...

    async def flush_cache(self) -> None:
        """Empty every server's prefix cache."""
        ...

    async def abort_until_idle(self) -> None:
        """Abort everything on every server, until none runs anything."""
        ...

    async def health(self) -> Mapping[str, bool]:
        """Whether each server answers that it is ready, by URL."""
        ...

    def statistics(self) -> ServerStatistics:
        """Counts of this moment."""
        ...


class Gateway(Protocol):
    """Where agents reach their sessions. ``trio_rollout.gateway.open_gateway`` gives one."""

    def open_session(
        self, rollout: Rollout, *, prompt: Prompt, sampling: SamplingParams
    ) -> AbstractAsyncContextManager[Session]:
        """A session whose turns are sampled by ``rollout.generate``."""
        ...


class Ledger(Protocol):
    """The engine's memory. ``open_ledger`` gives one on disk."""

    async def begin(self, identity: RunIdentity) -> Recovered:
        """Bind the ledger to a run and return what it remembers.

        Raises:
          LedgerError: it belongs to another run, is of a newer format, or is in use.
        """
        ...

    async def record(self, events: Sequence[Event]) -> None:
        """Write these events in one transaction.

        Blocks until they are on disk. Cancelled before the write was accepted, nothing is written; later it waits for
        the write's end and returns normally.

        Raises:
          LedgerError: this write, or one before it, failed; nothing of it counts as written.
        """
        ...


class Instrument(Protocol):
    """Watches the engine. Called synchronously between steps; must not block or raise."""

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """Something happened: ``group.started``, ``group.settled``, ``turn.finished``, ``weights.updated``, …"""
        ...


__all__ = [
    "Drop",
    "Gateway",
    "Generate",
    "GroupFilter",
    "GroupReward",
    "IdArray",
    "InferenceServers",
    "Instrument",
    "Keep",
    "Ledger",
    "ModelInput",
    "OnTokens",
    "Reward",
    "Rollout",
    "Session",
    "Source",
]
