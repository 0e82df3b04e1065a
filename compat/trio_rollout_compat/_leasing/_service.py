"""The lease service: an engine like any other, whose generate function lends groups to nodes.

It has everything that an engine has: source and ledger, admission that stops while no batches are taken, requeues, batches that
are acked, the drain. Decision: docs/decisions/0017-a-cluster-is-an-engine-that-lends.md.
"""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, cast, final

import attrs
import trio

from trio_rollout import (
    Batch,
    Deadlines,
    EngineSettings,
    EngineStatistics,
    Group,
    GroupId,
    PauseMode,
    Prompt,
    QuarantineReport,
    RolloutEngine,
    SamplingParams,
    ServerStatistics,
    Trajectory,
    Turn,
    open_ledger,
    open_rollout_engine,
)
from trio_rollout.abc import GroupFilter, ModelInput, Rollout, Source
from trio_rollout.errors import RolloutError, ServerError

from ._leases import Leases, Worker, open_leases
from ._node import Score

_NO_SERVERS: Final = "the lease service has no servers, its nodes have them"


@final
@attrs.frozen(eq=False)
class NoServers:
    """Stands for the servers in the lease service's engine, which has none: the nodes have them."""

    def under(self, deadlines: Deadlines) -> "NoServers":
        """Return itself."""
        del deadlines
        return self

    def encode(self, prompt: Prompt) -> ModelInput:
        """Refuse. The lease service's generate function does not ask."""
        raise ServerError(f"encode {prompt.id!r}: {_NO_SERVERS}")

    async def generate(self, input_ids: ModelInput, sampling: SamplingParams, **more: object) -> Turn:
        """Refuse. The lease service's generate function does not ask."""
        del input_ids, sampling, more
        await trio.lowlevel.checkpoint()
        raise ServerError(f"generate: {_NO_SERVERS}")

    async def pause(self, mode: PauseMode) -> None:
        """Refuse: the trainer updates the weights itself and says so with ``note_weight_version``."""
        await trio.lowlevel.checkpoint()
        raise ServerError(f"pause({mode}): {_NO_SERVERS}")

    async def resume(self) -> None:
        """Resume no server."""
        await trio.lowlevel.checkpoint()

    async def versions(self) -> Mapping[str, int | None]:
        """Return no version."""
        await trio.lowlevel.checkpoint()
        return {}

    def require_version(self, version: int, *, named_by: Collection[str] = ()) -> None:
        """Require nothing."""

    async def blocked_reason_after(self, known: str | None) -> str | None:
        """Wait for ever: no reason would be known here."""
        del known
        await trio.sleep_forever()

    def statistics(self) -> ServerStatistics:
        """Return counts that are all zero."""
        return ServerStatistics(servers=(), connections=0, owed_aborts=0, orphans=0, late=0)


@final
@attrs.frozen(eq=False)
class Lending:
    """The service's generate function and its rewards: lends each try at a sample to a node, and what is only to be scored."""

    _leases: Leases

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Run one try at a sample on some node. Blocks until it is over there; cancelled, it is revoked.

        Raises:
          NodeLost: the node is gone.
          FailedElsewhere: the try failed on its node.
        """
        settled = await self._leases.sample(prompt, rollout.index, rollout.attempt, rollout.note_tokens)
        settled.raise_failure()
        return cast("Trajectory", settled.trajectory)

    async def reward(self, trajectory: Trajectory, /) -> Score:
        """Return the reward that the node gave; of a trajectory that lacks one, have some node score it.

        Blocks, is cancelled and raises as a sample does.
        """
        if trajectory.reward is not None:
            await trio.lowlevel.checkpoint()
            return trajectory.reward
        return cast("Score", await self._scored(trajectory))

    async def group_reward(self, group: Group, /) -> Sequence[Score]:
        """Have some node score a finished group. Blocks, is cancelled and raises as a sample does."""
        return cast("Sequence[Score]", await self._scored(group))

    async def _scored(self, sampled: Trajectory | Group) -> object:
        settled = await self._leases.score(sampled)
        settled.raise_failure()
        return settled.score


@attrs.frozen(kw_only=True)
class Head:
    """A batch without its groups. ``ids``: the groups' ids, in order."""

    id: str
    step: int
    ids: tuple[GroupId, ...]
    redelivered: bool
    statistics: EngineStatistics


@final
@attrs.define(eq=False, repr=False)
class LeaseService:
    """The trainer's requests. ``holder`` names the service until it is restarted: batches of an earlier one are unknown."""

    holder: str
    _engine: RolloutEngine
    _leases: Leases
    _batches: dict[str, Batch] = attrs.field(factory=dict, init=False)

    async def hello(self) -> str:
        """Return ``holder``."""
        await trio.lowlevel.checkpoint()
        return self.holder

    async def next_batch(self, size: int, timeout: float | None) -> tuple[Head, tuple[Group, ...]]:  # noqa: ASYNC109  the trainer's
        """Return the next batch; see ``RolloutEngine.next_batch``. Cancelled or timed out, it has taken nothing.

        Raises:
          TimeoutError: fewer groups were ready after ``timeout`` seconds.
          ServerError: every node is gone for good.
          EndOfData, EngineClosed: as ``next_batch`` of the engine.
        """
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            batch = await self._leases.unless_all_are_gone(lambda: self._engine.next_batch(size))
            self._batches[batch.id] = batch
            ids = tuple(group.id for group in batch.groups)
            head = Head(
                id=batch.id, step=batch.step, ids=ids, redelivered=batch.redelivered, statistics=batch.statistics
            )
            return head, batch.groups
        raise TimeoutError(f"next_batch({size}): fewer groups were finished within {timeout} s")

    async def ack(self, batch_id: str) -> None:
        """See ``Batch.ack``.

        Raises:
          RolloutError: the batch was acked before, or the service was restarted since.
        """
        batch = self._batches.get(batch_id)
        if batch is None:
            raise RolloutError(f"ack of batch {batch_id}: it is acked already, or the service was restarted since")
        await batch.ack()
        del self._batches[batch_id]

    async def offers(self, ids: Sequence[GroupId]) -> bool:
        """Return True if all these groups are ready: a restarted service offers what was delivered and not acked."""
        await trio.lowlevel.checkpoint()
        return set(ids) <= set(self._engine.ready_ids())

    async def statistics(self) -> tuple[EngineStatistics, tuple[str, ...], int]:
        """Return the engine's counts, the nodes that can be used, and the number of samples that are lent."""
        await trio.lowlevel.checkpoint()
        return self._engine.statistics(), tuple(self._leases.nodes), self._leases.out

    async def quarantined(self) -> Sequence[QuarantineReport]:
        """See ``RolloutEngine.quarantined``."""
        await trio.lowlevel.checkpoint()
        return tuple(self._engine.quarantined())

    async def note_weight_version(self, version: int) -> None:
        """See ``RolloutEngine.note_weight_version``."""
        await self._engine.note_weight_version(version)


def service_settings(settings: EngineSettings, nodes: int) -> EngineSettings:
    """Return the settings of the service's engine: it runs what all nodes together may run. The times of a try are the nodes'."""
    return attrs.evolve(
        settings,
        max_running=settings.max_running * nodes,
        deadlines=attrs.evolve(settings.deadlines, rollout=None, turn=None, no_progress=None),
    )


@asynccontextmanager
async def open_lease_service(
    workers: Sequence[Worker],
    open_source: Callable[[], Source],
    *,
    settings: EngineSettings,
    holder: str,
    ledger: Path | None = None,
    group_filter: GroupFilter | None = None,
    scores_samples: bool = False,
    scores_groups: bool = False,
) -> AsyncGenerator[LeaseService]:
    """Open source, ledger and engine of the service. Leaving drains, within ``Deadlines.drain``.

    ``scores_samples``: the nodes have a reward; ``scores_groups``: they have a group reward.
    """
    async with AsyncExitStack() as stack:
        opened = None if ledger is None else await stack.enter_async_context(open_ledger(ledger))
        leases = await stack.enter_async_context(
            open_leases(workers, holder=holder, capacity=settings.max_running, cleanup_s=settings.deadlines.abort)
        )
        lending = Lending(leases)
        engine = await stack.enter_async_context(
            open_rollout_engine(
                open_source(),
                lending,
                servers=NoServers(),
                reward=lending.reward if scores_samples else None,
                group_reward=lending.group_reward if scores_groups else None,
                group_filter=group_filter,
                ledger=opened,
                settings=service_settings(settings, len(workers)),
            )
        )
        yield LeaseService(holder, engine, leases)
