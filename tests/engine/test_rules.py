"""Rules that no other test would miss: each has a patch in tests/mutations that breaks it."""

from contextlib import suppress

import pytest
import trio

from trio_rollout import Drop, PauseMode, Retry
from trio_rollout.engine._gate import Gate
from trio_rollout.errors import EngineClosed, RolloutError
from trio_rollout.sources import IterableSource
from trio_rollout.testing import FakeServers, Say, prompts
from trio_rollout.testing._sim.disk import SimDisk

from .conftest import take_all, world
from .test_edges import ledger_on
from .test_leaving import Remembering


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("order", [(2, 0), (2, 1, 0), (1, 2, 0)])
async def test_f139_an_ack_out_of_order_lowers_the_last_acked_step_nowhere(order, restarts):
    disk = SimDisk()
    async with ledger_on(disk) as ledger, world(8, ledger=ledger) as w:
        batches = [await w.engine.next_batch(2) for _ in range(3)]
        for number in order:
            await batches[number].ack()
        if not restarts:
            with pytest.raises(RolloutError, match="step 2 was acked"):
                await w.engine.restore(1)
    async with ledger_on(disk) as ledger, world(8, ledger=ledger) as w:
        with pytest.raises(RolloutError, match="step 2 was acked"):
            await w.engine.restore(1)
        await w.engine.restore(2)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("step", [-1, 0, 1])
async def test_f139_restored_groups_come_in_the_order_of_their_deliveries(restarts, step):
    """Before those that were ready and not delivered."""
    disk = SimDisk()
    async with ledger_on(disk) as ledger, world(12, ledger=ledger, max_ready=12) as w:
        batches = [await w.engine.next_batch(2) for _ in range(3)]
        while len(w.engine.ready_ids()) < 6:
            await trio.sleep(1)
        delivered = [group.id for batch in batches[step + 1 :] for group in batch.groups]
        rest = list(w.engine.ready_ids())
        if not restarts:
            await w.engine.restore(step)
            assert list(w.engine.ready_ids()) == delivered + rest
            assert [group.id for group in (await w.engine.next_batch(12 - 2 * (step + 1))).groups] == delivered + rest
    if restarts:
        async with ledger_on(disk) as ledger, world(12, ledger=ledger, max_ready=12) as w:
            await w.engine.restore(step)
            assert list(w.engine.ready_ids()) == delivered + rest


async def test_f140_without_a_restore_the_deliveries_of_an_earlier_process_are_taken_back_on_disk_too():
    """The second life takes one of the two groups and is killed after its checkpoint: the other one is not trained."""
    disk = SimDisk()
    async with ledger_on(disk) as ledger, world(4, ledger=ledger) as w:
        first = await w.engine.next_batch(2)
    async with ledger_on(disk) as ledger, world(4, ledger=ledger) as w:
        second = await w.engine.next_batch(1)
        assert (second.step, second.redelivered) == (1, True)
    async with ledger_on(disk) as ledger, world(4, ledger=ledger) as w:
        await w.engine.restore(second.step)
        assert w.engine.statistics().acked == 1
        rest = {group.id for group in await take_all(w.engine)}
    assert {group.id for group in first.groups} - {group.id for group in second.groups} <= rest
    assert len(rest) == 3


class Slow(Remembering):
    """Takes prompts back in four seconds."""

    async def give_back(self, prompts):
        await trio.sleep(4)
        await super().give_back(prompts)


@pytest.mark.parametrize("how", ["drain", "leave", "cleanup"])
async def test_f139_however_long_the_grace_was_giving_back_has_its_time(how):
    source = Slow(40)

    async def generate(prompt, rollout):
        if how == "cleanup":
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(60)
        return rollout.finish([await rollout.generate(rollout.input)])

    plan = lambda *_: Say(seconds=500)
    async with world(source=source, plan=plan, generate=generate, deadlines={"drain": 10.0, "abort": 5.0}) as w:
        await trio.sleep(1)
        if how == "drain":
            await w.engine.drain(grace=100)
            assert len(source.returned) == w.engine.statistics().pulled
    counts = w.engine.statistics()
    assert counts.waiting == counts.running == 0
    assert len(source.returned) == counts.returned == counts.pulled


@pytest.mark.parametrize("last", ["gate", "server"])
async def test_f139_a_clock_stands_still_until_its_last_holder_is_left(last):
    """A window opens while a request waits for a server, and one of the two ends first."""
    gate = Gate()
    with gate.clock(10) as clock:
        await trio.sleep(3)
        held = clock.stopped()
        held.__enter__()  # noqa: PLC2801  the two holds overlap, and either may be left first
        gate.close()
        if last == "server":
            await gate.open()
        else:
            held.__exit__(None, None, None)
        await trio.sleep(100)
        if last == "server":
            held.__exit__(None, None, None)
        else:
            await gate.open()
        await trio.sleep(6)
    assert not clock.scope.cancelled_caught
    with gate.clock(10) as clock:
        await trio.sleep(11)
    assert clock.scope.cancelled_caught


async def test_f139_a_continuation_that_got_a_token_begins_the_count_of_empty_ones_again():
    """Two empty ones in a row are allowed; here there are many, and a token between each two."""
    servers = FakeServers(plan=lambda _, context: Say(tokens=8, seconds=8 - (len(context) - 3)))
    retry = Retry(max_free=2, backoff_base=0.01, backoff_max=0.1)
    async with (
        world(1, servers=servers, partial=True, retry=retry, samples_per_prompt=1) as w,
        trio.open_nursery() as nursery,
    ):

        @nursery.start_soon
        async def disturb():
            while True:
                for seconds in (0.5, 0.5, 1.5):
                    await trio.sleep(seconds)
                    servers.abort_all()

        groups = await take_all(w.engine)
        nursery.cancel_scope.cancel()
        assert [row.segments[0].response_length for group in groups for row in group.trajectories] == [8]
        assert not sum(w.engine.statistics().retries.values())
        assert servers.calls > 6


async def test_f139_an_evaluation_has_no_filter_of_the_training():
    asked = []

    async def none_at_all(group):
        asked.append(group.prompt.id)
        return Drop("not worth training on")

    async with world(2, group_filter=none_at_all) as w:
        groups = await w.engine.evaluate(IterableSource(prompts(3, prefix="e")), samples_per_prompt=2)
        assert [len(group.trajectories) for group in groups] == [2, 2, 2]
        assert await take_all(w.engine) == []
        assert w.engine.statistics().filtered == 2
    assert sorted(asked) == ["p0", "p1"]


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_f139_a_restore_lets_no_version_be_named_again(mode):
    """The permission that a restore once gave was never taken back by a window; now there is none."""
    async with world(40) as w:
        for version in (2, 4):
            async with w.engine.weight_update(version=version, mode=mode):
                w.servers.set_version(version)
        await w.engine.next_batch(2)
        await w.engine.restore(-1)
        for version in (3, 4):
            with pytest.raises(ValueError, match="must be above the current version 4"):
                async with w.engine.weight_update(version=version, mode=mode):
                    raise AssertionError("the body ran")
    with suppress(EngineClosed):
        await w.engine.drain()
