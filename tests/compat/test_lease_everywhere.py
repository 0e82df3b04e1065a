"""A node, or the lease service, ends before any step of any task: nothing is lost, nothing is left."""

from contextlib import suppress
from functools import partial

import attrs
import trio

from trio_rollout import Cause, IterableSource
from trio_rollout.errors import EndOfData
from trio_rollout.testing import FakeServers, cancel_everywhere, prompts
from trio_rollout_compat._leasing._service import open_lease_service

from .cluster import EIGHT, Local, cluster, groups_of, is_settled


async def losing_a_node(arm):
    """Four groups on two nodes, one of which dies when the armed scope is cancelled: before any step of any task."""
    calls = []

    async def generate(prompt, rollout):
        calls.append((prompt.id, rollout.index))
        return rollout.finish([await rollout.generate(rollout.input)])

    async def group_reward(group):
        await trio.sleep(0.5)
        return [1.0] * len(group.trajectories)

    async def kill_one():
        with trio.CancelScope() as scope:
            arm(scope)
            await trio.sleep_forever()
        nodes[0].kill()

    settings = attrs.evolve(EIGHT, samples_per_prompt=3, max_running=6)
    parts = {"generate": generate, "group_reward": group_reward}
    async with cluster(4, nodes=2, settings=settings, **parts) as (service, nodes), trio.open_nursery() as nursery:
        nursery.start_soon(kill_one)
        groups = await groups_of(service)
        counts, _, out = await service.statistics()
        nursery.cancel_scope.cancel()
    lost = nodes[0].lost
    arm.sometimes("a node dies with samples", lost)
    arm.sometimes("a node dies with finished samples of unfinished groups", lost and len(calls) < 12 + lost)
    return groups, counts, out, calls, lost


def test_a_node_that_dies_before_any_step_costs_what_it_was_running(caplog):
    def check(state, point):
        groups, counts, out, calls, lost = state
        assert len({group.id for group in groups}) == len(groups) == 4
        assert all([row.index for row in group.trajectories] == [0, 1, 2] for group in groups)
        assert all(row.reward == 1.0 for group in groups for row in group.trajectories)
        assert counts.retries[Cause.INFRASTRUCTURE] == sum(counts.retries.values()) == lost
        assert (counts.quarantined, sum(counts.requeues.values()), out) == (0, 0, 0)
        assert 12 <= len(calls) <= 12 + lost
        assert is_settled(counts)

    sweep = cancel_everywhere(losing_a_node, check, sample=150)
    sweep.require("a node dies with samples", "a node dies with finished samples of unfinished groups", at_least=10)


async def losing_the_service(arm):
    """The service is cancelled before any step; a new one then lends the rest of the prompts to the same nodes."""
    source, taken = IterableSource(prompts(6)), []
    settings = attrs.evolve(EIGHT, samples_per_prompt=3, max_running=6)
    nodes = [Local(f"node {number}", FakeServers(), {"reward": one}) for number in range(2)]
    opened = partial(open_lease_service, nodes, lambda: source, settings=settings, scores_samples=True)

    async def take(service):
        with suppress(EndOfData):
            while True:
                head, groups = await service.next_batch(1, None)
                taken.extend(group.prompt.id for group in groups)  # a cancelled call has taken nothing
                await service.ack(head.id)

    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.serve, settings)
        with trio.CancelScope() as scope:
            arm(scope)
            async with opened(holder="first") as service:
                await take(service)
        arm.sometimes("samples are lent when the service ends", any(node.servers.running for node in nodes))
        async with opened(holder="second") as service:
            await take(service)
            counts, *_ = await service.statistics()
        await trio.sleep(10)
        held = [node.node._held for node in nodes]
        running = [node.servers.running for node in nodes]
        nursery.cancel_scope.cancel()
    return taken, counts, held, running


async def one(trajectory):
    await trio.lowlevel.checkpoint()
    return 1.0


def test_a_service_that_ends_before_any_step_leaves_nothing_on_its_nodes(caplog):
    def check(state, point):
        taken, counts, held, running = state
        assert sorted(taken) == sorted(f"p{number}" for number in range(6))
        assert (held, running, counts.quarantined) == ([{}, {}], [0, 0], 0)
        assert is_settled(counts)

    cancel_everywhere(losing_the_service, check, sample=80).require()
