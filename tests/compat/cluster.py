"""A cluster in this process, in virtual time: a lease service over nodes that can be killed."""

from contextlib import AsyncExitStack, asynccontextmanager, suppress

import attrs
import trio

from trio_rollout import Deadlines, EngineSettings, IterableSource, Retry, SingleTurn
from trio_rollout.errors import EndOfData
from trio_rollout.testing import FakeServers, Say, is_conserved, prompts
from trio_rollout_compat._leasing._leases import NodeLost
from trio_rollout_compat._leasing._node import NodeParts, open_node
from trio_rollout_compat._leasing._service import open_lease_service

SETTINGS = EngineSettings(
    samples_per_prompt=2, max_running=4, max_ready=4, deadlines=Deadlines(group=50), retry=Retry(jitter=0)
)

EIGHT = attrs.evolve(SETTINGS, samples_per_prompt=8, max_running=16, retry=Retry(jitter=0, max_attempts=1))


@attrs.define(eq=False)
class Local:
    """A node in this process. ``kill`` has the effect of its process's death; then it comes back, or not."""

    name: str
    servers: FakeServers
    more: dict = attrs.field(factory=dict)
    comes_back: bool = True
    node: object = None
    lives: int = 0
    most: int = 0
    lost: int = 0
    _dead: trio.Event = attrs.field(factory=trio.Event)
    _up: trio.Event = attrs.field(factory=trio.Event)
    _running: int = 0

    async def serve(self, settings, *, task_status):
        """Run the node, again after each kill."""
        task_status.started()
        while True:
            dead = self._dead = trio.Event()
            async with open_node(self._parts, settings) as self.node:
                self.lives += 1
                self._up.set()
                await dead.wait()
            if not self.comes_back:
                return
            await trio.sleep(5)

    @asynccontextmanager
    async def _parts(self):
        yield NodeParts(**{"generate": SingleTurn(), "servers": self.servers, **self.more})

    @property
    def is_up(self):
        return self._up.is_set()

    def kill(self):
        self._up = trio.Event()
        self._dead.set()

    async def run(self, lease):
        self._running += 1
        self.most = max(self.most, self._running)
        dead, settled = self._dead, []
        try:
            async with trio.open_nursery() as nursery:

                async def work():
                    settled.append(await self.node.run(lease))
                    nursery.cancel_scope.cancel()

                nursery.start_soon(work)
                await dead.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._running -= 1
        if not settled or dead.is_set():
            self.lost += lease.sampled is None
            raise NodeLost(f"{self.name} was killed")
        return settled[0]

    def revoke(self, lease):
        self.node.revoke(lease.holder, lease.number)

    async def returned(self, holder):
        if self._dead.is_set() and not self.comes_back:
            return False
        await self._up.wait()
        self.node.adopt(holder)
        return True


@asynccontextmanager
async def cluster(count, *, nodes=3, settings=SETTINGS, service=None, seconds=1.0, **more):
    """Open a service over ``nodes`` nodes and ``count`` prompts; yield service and nodes."""
    plan = more.pop("plan", lambda number, prompt: Say(seconds=seconds))
    locals_ = [Local(f"node {number}", FakeServers(plan=plan), more) for number in range(nodes)]
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        for node in locals_:
            await nursery.start(node.serve, settings)
        stack.callback(nursery.cancel_scope.cancel)
        opened = open_lease_service(
            locals_,
            lambda: IterableSource(prompts(count)),
            settings=settings,
            holder="first",
            scores_samples="reward" in more,
            scores_groups="group_reward" in more,
            **(service or {}),
        )
        yield await stack.enter_async_context(opened), locals_


async def groups_of(service, size=1):
    """Take and ack every batch until the end; return the groups in their order."""
    taken = []
    with suppress(EndOfData):
        while True:
            head, groups = await service.next_batch(size, None)
            assert [group.id for group in groups] == list(head.ids)
            await service.ack(head.id)
            taken += groups
    return taken


async def take_all(service, size=1):
    """Take and ack every batch until the end; return the ids of the prompts in their order."""
    return [group.prompt.id for group in await groups_of(service, size)]


def everything(count):
    return sorted(f"p{number}" for number in range(count))


def is_settled(counts):
    tokens = counts.tokens
    parts = (tokens.in_flight, tokens.kept, tokens.delivered, tokens.filtered, tokens.wasted_total)
    return is_conserved(counts) and tokens.in_flight == 0 and min(parts) >= 0 and sum(parts) == counts.generated_tokens
