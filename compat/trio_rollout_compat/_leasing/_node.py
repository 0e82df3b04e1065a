"""A node: an engine whose source is the groups that it was lent, and whose trainer is the lease.

``Node`` owns the leases that this node has, and is source, generate function, rewards and instrument of its engine in one.
Each lease is a separate group of that engine, even if the same group was lent before: the lease's number is the epoch of its
prompt. Decision: docs/decisions/0017-a-cluster-is-an-engine-that-lends.md.
"""

import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Final, TypeAlias, final

import attrs
import trio

from trio_rollout import (
    Cause,
    EngineSettings,
    Failure,
    Group,
    Prompt,
    RolloutEngine,
    SamplingParams,
    Segment,
    Staleness,
    Trajectory,
    open_rollout_engine,
)
from trio_rollout.abc import (
    Event,
    Gateway,
    Generate,
    GroupQuarantined,
    GroupReward,
    InferenceServers,
    Instrument,
    Reward,
    Rollout,
)
from trio_rollout.lowlevel import Condition, open_service_nursery

from .._host_servers import HostServers
from ._leases import Lease, Settled

Score: TypeAlias = float | Mapping[str, float]
# A node never fails for its groups' failures: the service counts them.
_NO_BUDGET: Final = 2**31
_NOTHING: Final = Segment(tokens=[0], response_length=1, loss_mask=[0], log_probs=[0.0], versions=())


@attrs.frozen(kw_only=True, eq=False)
class NodeParts:
    """The parts of a node's engine; see ``open_rollout_engine``."""

    generate: Generate
    servers: InferenceServers
    reward: Reward | None = None
    group_reward: GroupReward | None = None
    gateway: Gateway | None = None
    instruments: Sequence[Instrument] = ()


OpenParts: TypeAlias = Callable[[], AbstractAsyncContextManager[NodeParts]]


@final
@attrs.define(eq=False)
class _Held:
    """A lease that this node has: the scopes of its running rollouts, and its outcome."""

    lease: Lease
    revoked: bool = attrs.field(default=False, init=False)
    scopes: set[trio.CancelScope] = attrs.field(factory=set, init=False)
    over: trio.Event = attrs.field(factory=trio.Event, init=False)
    settled: Settled = attrs.field(factory=Settled, init=False)

    def revoke(self) -> None:
        self.revoked = True
        for scope in self.scopes:
            scope.cancel(reason="the lease was revoked")

    @contextmanager
    def running(self, scope: trio.CancelScope) -> Generator[None]:
        self.scopes.add(scope)
        try:
            yield
        finally:
            self.scopes.discard(scope)

    def settle(self, settled: Settled) -> None:
        self.settled = settled
        self.over.set()


@final
@attrs.define(eq=False, repr=False)
class Node:
    """The leases of one node: source, generate function, rewards and instrument of its engine."""

    parts: NodeParts
    _held: dict[int, _Held] = attrs.field(factory=dict, init=False)
    _queue: deque[int] = attrs.field(factory=deque, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    async def run(self, lease: Lease) -> Settled:
        """Run a group and return its outcome. Blocks until then. Cancelled, the lease is revoked."""
        number, held = next(self._numbers), _Held(lease)
        self._held[number] = held
        self._queue.append(number)
        self._changed.notify()
        try:
            await held.over.wait()
        finally:
            if not held.over.is_set():
                self._revoke(number)
        return held.settled

    def revoke(self, holder: str, number: int) -> None:
        """End a lease soon, if it is still held: its result is no longer wanted."""
        for mine, held in list(self._held.items()):
            if (held.lease.holder, held.lease.number) == (holder, number):
                self._revoke(mine)

    def adopt(self, holder: str) -> None:
        """Accept leases of this holder, and revoke those of the service before it was restarted."""
        for mine, held in list(self._held.items()):
            if held.lease.holder != holder:
                self._revoke(mine)

    def _revoke(self, number: int) -> None:
        held = self._held[number]
        held.revoke()
        if number in self._queue:
            self._queue.remove(number)
            self._settle(number, Settled())

    def _settle(self, number: int, settled: Settled) -> None:
        held = self._held.pop(number)
        held.settle(Settled(failure=_revoked(held.lease)) if held.revoked else settled)

    async def take(self, count: int) -> Sequence[Prompt]:
        """Return groups that were lent, as the engine's source. It never ends; blocks while there is none."""
        await self._changed.wait_until(lambda: bool(self._queue))
        numbers = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        return [attrs.evolve(self._held[number].lease.prompt, epoch=number) for number in numbers]

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Settle the leases of groups that the engine did not finish: the service lends them elsewhere."""
        await trio.lowlevel.checkpoint()
        for prompt in prompts:
            failure = Failure(cause=Cause.SHUTDOWN, type="", message="the node was closed")
            self._settle(prompt.epoch, Settled(failure=failure))

    def state(self) -> dict[str, object]:
        """Return nothing: the service has the ledger."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Restore nothing."""
        del state

    @property
    def sampling(self) -> SamplingParams:
        """The default of the user's generate function, under the name that the engine looks for."""
        sampling = getattr(self.parts.generate, "sampling", None)
        return sampling if isinstance(sampling, SamplingParams) else SamplingParams()

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Run the user's generate function with the prompt as it was lent: the engine's generate function.

        A revoked group ends like any other, with nothing in it, so that it counts as no failure and is not tried again.
        """
        held = self._held[prompt.epoch]
        if not held.revoked:
            with trio.CancelScope() as scope, held.running(scope):
                return await self.parts.generate(self._lent(prompt), rollout)
        await trio.lowlevel.checkpoint()
        return Trajectory(prompt=prompt, index=rollout.index, segments=[_NOTHING])

    async def reward(self, trajectory: Trajectory) -> Score:
        """Call the user's reward, with the prompt as it was lent."""
        if self.parts.reward is None or self._held[trajectory.prompt.epoch].revoked:
            await trio.lowlevel.checkpoint()
            return 0.0
        return await self.parts.reward(attrs.evolve(trajectory, prompt=self._lent(trajectory.prompt)))

    async def group_reward(self, group: Group) -> Sequence[Score]:
        """Call the user's group reward, with the prompt as it was lent."""
        if self.parts.group_reward is None or self._held[group.prompt.epoch].revoked:
            await trio.lowlevel.checkpoint()
            return [0.0] * len(group.trajectories)
        prompt = self._lent(group.prompt)
        rows = [attrs.evolve(row, prompt=prompt) for row in group.trajectories]
        return await self.parts.group_reward(attrs.evolve(group, id=prompt.group_id, prompt=prompt, trajectories=rows))

    def _lent(self, prompt: Prompt) -> Prompt:
        return attrs.evolve(prompt, epoch=self._held[prompt.epoch].lease.prompt.epoch)

    def event(self, event: Event, /) -> None:
        """Settle the lease of a group that was given up: the node is its engine's instrument."""
        if isinstance(event, GroupQuarantined):
            error = attrs.evolve(event.report.error, cause=event.report.cause)
            self._settle(event.id.epoch, Settled(failure=error))

    async def deliver(self, engine: RolloutEngine) -> None:
        """Settle the lease of each finished group: the engine's trainer."""
        async for batch in engine.batches(1):
            for group in batch.groups:
                self._settle(group.id.epoch, Settled(rows=group.trajectories))
            await batch.ack()


def _revoked(lease: Lease) -> Failure:
    return Failure(cause=Cause.CANCELLED, type="", message=f"{lease} was revoked")


def node_settings(settings: EngineSettings) -> EngineSettings:
    """Return the settings of a node's engine: it retries, but the service counts failures and judges staleness."""
    return attrs.evolve(settings, failure_budget=_NO_BUDGET, staleness=Staleness())


@asynccontextmanager
async def open_node(open_parts: OpenParts, settings: EngineSettings) -> AsyncGenerator[Node]:
    """Open a node's engine, ready to be lent groups. Leaving drains it; unfinished groups go back to the service."""
    async with open_parts() as parts:
        node = Node(parts)
        async with (
            open_rollout_engine(
                node,
                node,
                servers=HostServers(parts.servers),
                reward=None if parts.reward is None else node.reward,
                group_reward=None if parts.group_reward is None else node.group_reward,
                settings=node_settings(settings),
                instruments=[node, *parts.instruments],
                gateway=parts.gateway,
            ) as engine,
            open_service_nursery() as nursery,
        ):
            nursery.start_soon(node.deliver, engine, name="deliver finished leases")
            yield node
