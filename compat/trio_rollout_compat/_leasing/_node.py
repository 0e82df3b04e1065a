"""A node: an engine whose source is the samples that it was lent, and whose trainer is the lease.

``Node`` owns the leases that this node has, and is source, generate function, reward and instrument of its engine in one.
Each lease of a sample is a separate group of that engine, even if the same sample was lent before: the lease's number is the
epoch of its prompt. It is one try: the first failure settles the lease, and the service decides what follows.
Decision: docs/decisions/0017-a-cluster-is-an-engine-that-lends.md.
"""

import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias, cast, final

import attrs
import trio

from trio_rollout import (
    Cause,
    EngineSettings,
    Failure,
    Group,
    Prompt,
    Resume,
    RolloutEngine,
    SamplingParams,
    Segment,
    Staleness,
    Status,
    Trajectory,
    Turn,
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
    ModelInput,
    OnTokens,
    Reward,
    Rollout,
    SampleRetried,
    Session,
)
from trio_rollout.errors import RequestRejected, RewardError, SettingsError
from trio_rollout.lowlevel import Condition, cause_of, ends_the_process, failure_of, open_service_nursery

from .._host_servers import HostServers
from ._leases import Lease, Settled

if TYPE_CHECKING:
    from trio_rollout.tools import RolloutTools

Score: TypeAlias = float | Mapping[str, float]
# A node never fails for its samples' failures: the service counts them.
_NO_BUDGET: Final = 2**31
_NOTHING: Final = Segment(tokens=[0], response_length=1, loss_mask=[0], log_probs=[0.0], versions=())
_NO_EXTRA: Final[Mapping[str, object]] = MappingProxyType({})
# The scorer's failures, once its tries are used up. What else ends a try while it is scored is a lack of time.
_SCORERS: Final = frozenset({Cause.ERROR, Cause.INFRASTRUCTURE, Cause.SERVER_LOST})


@attrs.frozen(kw_only=True, eq=False)
class NodeParts:
    """The parts of a node's engine; see ``open_rollout_engine``. ``group_reward`` is called on any node, with the whole group."""

    generate: Generate
    servers: InferenceServers
    reward: Reward | None = None
    group_reward: GroupReward | None = None
    gateway: Gateway | None = None
    instruments: Sequence[Instrument] = ()


OpenParts: TypeAlias = Callable[[], AbstractAsyncContextManager[NodeParts]]


@final
@attrs.frozen(eq=False)
class LentRollout:
    """The rollout of a node's engine as the user's generate function sees it: ``attempt`` and ``index`` are the service's."""

    _rollout: Rollout
    _lease: Lease

    @property
    def attempt(self) -> int:
        """See ``Rollout.attempt``."""
        return self._lease.attempt

    @property
    def index(self) -> int:
        """See ``Rollout.index``."""
        return self._lease.index

    @property
    def deadline(self) -> float:
        """See ``Rollout.deadline``; the group's deadline is the service's, and is not known here."""
        return self._rollout.deadline

    @property
    def weight_version(self) -> int:
        """See ``Rollout.weight_version``."""
        return self._rollout.weight_version

    @property
    def new_tokens(self) -> int:
        """See ``Rollout.new_tokens``."""
        return self._rollout.new_tokens

    def note_tokens(self, count: int) -> None:
        """See ``Rollout.note_tokens``."""
        self._rollout.note_tokens(count)

    @property
    def replaying(self) -> bool:
        """See ``Rollout.replaying``."""
        return self._rollout.replaying

    @property
    def input(self) -> ModelInput:
        """See ``Rollout.input``."""
        return self._rollout.input

    async def generate(
        self,
        input_ids: ModelInput,
        sampling: SamplingParams | None = None,
        *,
        extra: Mapping[str, object] = _NO_EXTRA,
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """See ``Rollout.generate``."""
        return await self._rollout.generate(input_ids, sampling, extra=extra, on_tokens=on_tokens)

    def session(self, *, sampling: SamplingParams | None = None) -> AbstractAsyncContextManager[Session]:
        """See ``Rollout.session``."""
        return self._rollout.session(sampling=sampling)

    @property
    def tools(self) -> "RolloutTools":
        """See ``Rollout.tools``."""
        return self._rollout.tools

    def finish(self, turns: Sequence[Turn], *, status: Status | None = None) -> Trajectory:
        """See ``Rollout.finish``."""
        return self._lease.at_home(self._rollout.finish(turns, status=status))


@final
@attrs.define(eq=False)
class _Held:
    """A lease that this node has: the scopes of its user code, what is known of its try, and its outcome."""

    lease: Lease
    revoked: bool = attrs.field(default=False, init=False)
    rollout: Rollout | None = attrs.field(default=None, init=False)
    sampled: Trajectory | None = attrs.field(default=None, init=False)
    rejected: bool = attrs.field(default=False, init=False)
    scopes: set[trio.CancelScope] = attrs.field(factory=set, init=False)
    over: trio.Event = attrs.field(factory=trio.Event, init=False)
    settled: Settled = attrs.field(factory=Settled, init=False)

    def revoke(self) -> None:
        self.revoked = True
        for scope in self.scopes:
            scope.cancel(reason="the lease was revoked")

    @contextmanager
    def running(self, scope: trio.CancelScope) -> Generator[None]:
        """Cancel this scope of user code if the lease is revoked in the block."""
        self.scopes.add(scope)
        try:
            yield
        finally:
            self.scopes.discard(scope)

    def settle(self, settled: Settled) -> None:
        if self.revoked:
            settled = Settled(failure=Failure(cause=Cause.CANCELLED, type="", message=f"{self.lease} was revoked"))
        self.settled = attrs.evolve(settled, tokens=0 if self.rollout is None else self.rollout.new_tokens)
        self.over.set()

    def failed(self, failure: Failure, *, for_good: bool) -> Settled:
        """Return the outcome of a failed try. What was sampled goes along: ``for_good``, and its scorer may have failed for good."""
        unscorable = for_good and self.sampled is not None and failure.cause in _SCORERS
        return Settled(failure=failure, trajectory=self.sampled, permanent=self.rejected or unscorable)


@final
@attrs.define(eq=False, repr=False)
class Node:
    """The leases of one node: source, generate function, reward and instrument of its engine.

    ``infrastructure``: see ``Retry.infrastructure``.
    """

    parts: NodeParts
    infrastructure: tuple[type[BaseException] | str, ...] = ()
    _held: dict[int, _Held] = attrs.field(factory=dict, init=False)
    _queue: deque[int] = attrs.field(factory=deque, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    async def run(self, lease: Lease) -> Settled:
        """Run a lease and return its outcome. Blocks until then. Cancelled, the lease is revoked."""
        number, held = next(self._numbers), _Held(lease)
        self._held[number] = held
        try:
            if lease.sampled is not None:
                self._settle(number, await self._scored(held, lease.sampled))
            else:
                self._queue.append(number)
                self._changed.notify()
                await held.over.wait()
        finally:
            if not held.over.is_set():
                self._revoke(number)
        return held.settled

    async def _scored(self, held: _Held, sampled: Trajectory | Group) -> Settled:
        try:
            with trio.CancelScope() as scope, held.running(scope):
                return Settled(score=await self._score_of(sampled))
        except BaseException as error:  # noqa: ASYNC103  the boundary of user code, whatever class it raises
            if ends_the_process(error):
                raise
            return Settled(failure=failure_of(error, cause_of(error, self.infrastructure)))  # noqa: ASYNC104  no Cancelled
        return Settled()

    def _score_of(self, sampled: Trajectory | Group) -> Awaitable[object]:
        if isinstance(sampled, Group):
            return (self.parts.group_reward or _refuse_to_score)(sampled)
        return (self.parts.reward or _refuse_to_score)(sampled)

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
        self._held[number].revoke()
        if number in self._queue:
            self._queue.remove(number)
            self._settle(number, Settled())

    def _settle(self, number: int, settled: Settled) -> None:
        """Settle a lease, unless it is settled: the engine here may go on with a sample whose first try has failed."""
        if (held := self._held.pop(number, None)) is not None:
            held.settle(settled)

    def _wanted(self, prompt: Prompt) -> _Held | None:
        """Return the lease that this prompt of the engine here stands for, if its result is still wanted."""
        held = self._held.get(prompt.epoch)
        return None if held is None or held.revoked else held

    async def take(self, count: int) -> Sequence[Prompt]:
        """Return samples that were lent, as the engine's source. It never ends; blocks while there is none."""
        await self._changed.wait_until(lambda: bool(self._queue))
        numbers = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        return [attrs.evolve(self._held[number].lease.prompt, epoch=number) for number in numbers]

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Settle the leases of samples that the engine did not finish: the service lends them elsewhere."""
        await trio.lowlevel.checkpoint()
        for prompt in prompts:
            failure = Failure(cause=Cause.INFRASTRUCTURE, type="", message="the node was closed")
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

        A sample whose lease is revoked or settled ends like any other, with nothing in it, so that it counts as no failure
        and is not tried again.
        """
        if (held := self._wanted(prompt)) is not None:
            held.rollout = rollout
            try:
                with trio.CancelScope() as scope, held.running(scope):
                    lent = attrs.evolve(prompt, epoch=held.lease.prompt.epoch)
                    made: object = await self.parts.generate(lent, LentRollout(rollout, held.lease))
                    own = attrs.evolve(made, prompt=prompt) if isinstance(made, Trajectory) else made
                    return cast("Trajectory", own)  # the engine refuses everything else
            except (RequestRejected, BaseExceptionGroup) as error:
                held.rejected = _is_rejection(error)
                raise
        await trio.lowlevel.checkpoint()
        return Trajectory(prompt=prompt, index=rollout.index, segments=[_NOTHING])

    async def reward(self, trajectory: Trajectory) -> Score:
        """Call the user's reward, with prompt and index as they were lent."""
        held = self._wanted(trajectory.prompt)
        if held is not None and self.parts.reward is not None:
            lent = held.lease.at_home(trajectory)
            held.sampled = attrs.evolve(lent, reward=None)
            with trio.CancelScope() as scope, held.running(scope):
                return await self.parts.reward(lent)
        await trio.lowlevel.checkpoint()
        return 0.0

    def event(self, event: Event, /) -> None:
        """Settle the lease of a sample whose try has failed: the node is its engine's instrument."""
        if isinstance(event, SampleRetried | GroupQuarantined) and (held := self._held.get(event.id.epoch)) is not None:
            for_good = isinstance(event, GroupQuarantined)
            failure = event.report.error if isinstance(event, GroupQuarantined) else event.error
            self._settle(event.id.epoch, held.failed(failure, for_good=for_good))

    async def deliver(self, engine: RolloutEngine) -> None:
        """Settle the lease of each finished sample: the engine's trainer."""
        async for batch in engine.batches(1):
            for group in batch.groups:
                self._settle(group.id.epoch, Settled(trajectory=group.trajectories[0]))
            await batch.ack()


async def _refuse_to_score(sampled: Trajectory | Group) -> object:
    await trio.lowlevel.checkpoint()
    raise RewardError(
        f"a {type(sampled).__name__} is to be scored, and this node has no scorer for it, though another one has"
    )


def _is_rejection(error: BaseException) -> bool:
    return isinstance(error, RequestRejected) or (
        isinstance(error, BaseExceptionGroup) and error.split(RequestRejected)[1] is None
    )


def node_settings(settings: EngineSettings) -> EngineSettings:
    """Return the settings of a node's engine: its groups are single samples. Groups, their time and staleness are the service's.

    Raises:
      SettingsError: turns are to be recorded. A node has no ledger, and can't tell which turns are too old.
    """
    if settings.resume is not Resume.SAMPLES:
        raise SettingsError(
            f"EngineSettings.resume: got {settings.resume}, allowed on nodes: {Resume.SAMPLES}, because a node has no ledger"
        )
    return attrs.evolve(
        settings,
        samples_per_prompt=1,
        min_samples=None,
        failure_budget=_NO_BUDGET,
        staleness=Staleness(),
        deadlines=attrs.evolve(settings.deadlines, group=None),
    )


@asynccontextmanager
async def open_node(open_parts: OpenParts, settings: EngineSettings) -> AsyncGenerator[Node]:
    """Open a node's engine, ready to be lent samples. Leaving drains it; unfinished samples go back to the service."""
    async with open_parts() as parts:
        node = Node(parts, settings.retry.infrastructure)
        async with (
            open_rollout_engine(
                node,
                node,
                servers=HostServers(parts.servers),
                reward=None if parts.reward is None else node.reward,
                settings=node_settings(settings),
                instruments=[node, *parts.instruments],
                gateway=parts.gateway,
            ) as engine,
            open_service_nursery() as nursery,
        ):
            nursery.start_soon(node.deliver, engine, name="deliver finished leases")
            yield node
