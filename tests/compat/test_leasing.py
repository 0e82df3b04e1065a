"""Lending samples to nodes, in virtual time: a dead node's samples run elsewhere, no node gets too many, each group comes once."""

from contextlib import asynccontextmanager
from functools import partial

import attrs
import pytest
import trio

from trio_rollout import Cause, Drop, IterableSource, Keep, Resume, Retry, SingleTurn
from trio_rollout.errors import RolloutError, ServerError, ServerLost, SettingsError
from trio_rollout.testing import HANG, FakeServers, Say, prompts
from trio_rollout_compat._leasing._leases import Lease
from trio_rollout_compat._leasing._node import NodeParts, open_node
from trio_rollout_compat._leasing._service import open_lease_service

from .cluster import SETTINGS, Local, cluster, everything, take_all


async def test_groups_run_on_all_nodes_and_each_comes_once(autojump_clock):
    async def length(trajectory):
        assert trajectory.prompt.epoch == 0
        return 1.0

    async with cluster(30, reward=length) as (service, nodes):
        assert sorted(await take_all(service)) == everything(30)
        counts, names, out = await service.statistics()
    assert counts.acked == 30
    assert (sorted(names), out) == (["node 0", "node 1", "node 2"], 0)
    assert all(node.servers.calls >= 10 for node in nodes)
    assert max(node.most for node in nodes) == 4


async def test_what_a_dead_node_had_runs_elsewhere(autojump_clock, caplog):
    async with cluster(90) as (service, nodes), trio.open_nursery() as nursery:

        async def kill_one():
            await trio.sleep(2.5)
            nodes[1].kill()

        nursery.start_soon(kill_one)
        assert sorted(await take_all(service)) == everything(90)
        counts, names, _ = await service.statistics()
    assert counts.retries[Cause.INFRASTRUCTURE] == 4
    assert counts.quarantined == 0
    assert len(names) == 3
    assert nodes[1].lives == 2


async def test_without_a_node_that_can_come_back_the_trainer_is_told(autojump_clock, caplog):
    async with cluster(30, nodes=2, seconds=10.0) as (service, nodes), trio.open_nursery() as nursery:
        for node in nodes:
            node.comes_back = False

        async def kill_both():
            await trio.sleep(5)
            for node in nodes:
                node.kill()

        nursery.start_soon(kill_both)
        with pytest.raises(ServerError, match=r"every node is gone for good. The last one: node \d was killed"):
            await take_all(service)
        counts, *_ = await service.statistics()
        assert counts.quarantined == 0
    assert counts.pulled == counts.waiting + counts.running


async def test_no_node_is_lent_anything_while_the_trainer_takes_nothing(autojump_clock):
    """Back pressure: four groups wait, and those that were lent before they were finished."""
    async with cluster(100) as (service, nodes):
        await trio.sleep(100)
        counts, _, out = await service.statistics()
        assert counts.ready == 4
        calls = sum(node.servers.calls for node in nodes)
        assert out == 0
        assert calls <= 2 * (4 + 12)
        await trio.sleep(100)
        assert sum(node.servers.calls for node in nodes) == calls
        await service.next_batch(1, None)


async def test_a_timeout_takes_nothing(autojump_clock):
    async with cluster(3, seconds=10.0) as (service, _):
        with pytest.raises(TimeoutError, match=r"next_batch\(3\): fewer groups were finished within 5 s"):
            await service.next_batch(3, 5)
        head, _ = await service.next_batch(3, None)
        assert len(head.ids) == 3
        await service.ack(head.id)
        with pytest.raises(RolloutError, match="acked already, or the service was restarted since"):
            await service.ack(head.id)


async def test_a_sample_is_tried_as_often_as_it_may_and_the_report_has_what_its_node_saw(autojump_clock, caplog):
    async def fail(prompt, rollout):
        if prompt.id == "p1":
            raise ValueError("no such tool")
        return await SingleTurn()(prompt, rollout)

    async with cluster(3, generate=fail) as (service, _):
        assert sorted(await take_all(service)) == ["p0", "p2"]
        (report,) = await service.quarantined()
    assert report.id.prompt == "p1"
    assert (report.cause, report.attempts) == (Cause.ERROR, 3)
    assert (report.error.type, report.error.message) == ("ValueError", "no such tool")
    assert "in fail" in report.error.traceback


async def test_servers_that_are_lost_send_the_sample_elsewhere(autojump_clock, caplog):
    """A node whose servers are gone gives its leases back; they cost no attempt."""
    settings = attrs.evolve(SETTINGS, retry=Retry(jitter=0, max_free=2, backoff_base=0.1))

    async def generate(prompt, rollout):
        if lost and prompt.id == "p1":
            lost.pop()
            raise ServerLost("the connection broke")
        return await SingleTurn()(prompt, rollout)

    lost = [1] * 4  # each of two samples may lose two in a row
    async with cluster(3, settings=settings, generate=generate) as (service, _):
        assert sorted(await take_all(service)) == everything(3)
        counts, *_ = await service.statistics()
    assert counts.retries[Cause.SERVER_LOST] == 4


async def test_the_filter_is_asked_once_by_the_service(autojump_clock):
    async def even(group):
        return Keep() if int(group.prompt.id[1:]) % 2 == 0 else Drop("odd")

    async with cluster(6, service={"group_filter": even}) as (service, _):
        assert sorted(await take_all(service)) == ["p0", "p2", "p4"]
        counts, *_ = await service.statistics()
    assert counts.filtered == 3


async def test_leaving_revokes_what_is_lent(autojump_clock, caplog):
    async with cluster(30, plan=lambda number, prompt: HANG) as (service, nodes):
        await trio.sleep(1)
        _, _, out = await service.statistics()
        assert out == 12
        begun = trio.current_time()
    assert trio.current_time() - begun <= SETTINGS.deadlines.drain
    assert sum(node.servers.aborts for node in nodes) == 12


async def test_a_service_that_starts_again_goes_on_from_its_ledger(tmp_path, caplog):
    """Leases from before the restart are revoked; no group is lost, and none comes again that was acked."""
    where, acked = tmp_path / "ledger", []
    nodes = [Local(f"node {number}", FakeServers(plan=lambda number, prompt: Say(seconds=0.01))) for number in range(2)]
    opened = partial(open_lease_service, nodes, lambda: IterableSource(prompts(20)), settings=SETTINGS, ledger=where)
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.serve, SETTINGS)
        with trio.CancelScope() as scope:  # as near to a kill as it gets here: no drain
            async with opened(holder="first") as service:
                for _ in range(3):
                    head, groups = await service.next_batch(2, None)
                    await service.ack(head.id)
                    acked += [group.prompt.id for group in groups]
                held, _ = await service.next_batch(2, None)
                scope.cancel()
                await trio.lowlevel.checkpoint()
        async with opened(holder="second") as service:
            assert await service.offers(held.ids)
            assert not await service.offers([*held.ids, *head.ids])  # the last of those is acked
            again, groups = await service.next_batch(2, None)
            assert again.redelivered
            assert set(again.ids) == set(held.ids)  # in the order of the source; they had come as they were finished
            assert not await service.offers(held.ids)
            acked += [group.prompt.id for group in groups]
            acked += await take_all(service)
        nursery.cancel_scope.cancel()
    assert sorted(acked) == everything(20)


async def test_a_new_life_of_the_service_has_the_old_one_s_leases_dropped(autojump_clock, caplog):
    @asynccontextmanager
    async def parts():
        yield NodeParts(generate=SingleTurn(), servers=FakeServers(plan=lambda number, prompt: HANG))

    (prompt,) = prompts(1)
    async with open_node(parts, SETTINGS) as node, trio.open_nursery() as nursery:
        settled = []

        async def run(lease):
            settled.append(await node.run(lease))

        nursery.start_soon(run, Lease(holder="old", number=0, prompt=prompt))
        await trio.sleep(1)
        node.adopt("new")
        await trio.sleep(6)
        assert "was revoked" in settled[0].failure.message


async def test_a_revoked_lease_that_had_not_begun_is_over_at_once(autojump_clock, caplog):
    @asynccontextmanager
    async def parts():
        yield NodeParts(generate=SingleTurn(), servers=FakeServers(plan=lambda number, prompt: HANG))

    (prompt,) = prompts(1)
    async with open_node(parts, attrs.evolve(SETTINGS, max_running=2)) as node, trio.open_nursery() as nursery:
        settled = {}

        async def run(number):
            settled[number] = await node.run(Lease(holder="a", number=number, prompt=prompt))

        for number in range(6):  # one runs, some are pulled ahead
            nursery.start_soon(run, number)
        await trio.sleep(1)
        for number in reversed(range(6)):
            node.revoke("a", number)
            node.revoke("a", 99)  # is nothing
        await trio.sleep(10)
        assert sorted(settled) == list(range(6))
        assert all(one.failure is not None for one in settled.values())


async def test_nodes_refuse_to_record_turns(autojump_clock):
    """A node has no ledger, and can't tell which turns are too old."""

    @asynccontextmanager
    async def parts():
        yield NodeParts(generate=SingleTurn(), servers=FakeServers())

    with pytest.raises(
        SettingsError, match=r"EngineSettings.resume: got Resume.TURNS, allowed on nodes: Resume.SAMPLES"
    ):
        async with open_node(parts, attrs.evolve(SETTINGS, resume=Resume.TURNS)):
            raise AssertionError("opened")
