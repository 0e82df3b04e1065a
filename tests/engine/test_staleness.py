"""The age of groups: paced at admission, or discarded when the trainer would get them."""

import pytest
import trio

from trio_rollout import Cause, Discard, Pace, PauseMode, Staleness
from trio_rollout._core.admission import Flow, is_too_old, pace_room
from trio_rollout.testing import Say, prompts

from .conftest import take_all, world


@pytest.mark.parametrize(
    ("bound", "age", "refused"), [(0, 0, False), (0, 1, True), (1, 1, False), (1, 2, True), (None, 99, False)]
)
def test_the_bound_is_exact(bound, age, refused):
    """F062: at the bound it is accepted, one above it is not."""
    assert is_too_old(5 - age, 5, Staleness(max_versions=bound)) is refused


def test_pacing_allows_bound_plus_one_versions_of_groups():
    """F063: never more than (bound + 1) x batch are outstanding, whatever the version's number."""
    staleness = Staleness(max_versions=1)
    assert pace_room(Flow(per_version=4, under_way=0, delivered=0, wanted=0), staleness) == 8
    assert pace_room(Flow(per_version=4, under_way=6, delivered=2, wanted=0), staleness) == 0
    assert pace_room(Flow(per_version=4, under_way=1, delivered=8, wanted=4), staleness) == 3
    assert pace_room(Flow(per_version=4, under_way=0, delivered=0, wanted=0), Staleness()) is None


async def bump(w):
    version = w.engine.weight_version + 1
    async with w.engine.weight_update(version=version, mode=PauseMode.RETRACT):
        w.servers.set_version(version)


def discard(bound, **policy):
    return Staleness(max_versions=bound, policy=Discard(**policy))


async def test_discard_counts_the_time_a_group_waits_in_the_buffer():
    """F060: done at v0, taken at v3, bound 2: not delivered but requeued as STALE."""
    async with world(2, staleness=discard(2)) as w:
        await trio.sleep(10)
        assert w.engine.statistics().ready == 2
        for _ in range(3):
            await bump(w)
        groups = await take_all(w.engine)
        counts = w.engine.statistics()

    assert counts.requeues[Cause.STALE] == 2
    assert [group.oldest_version for group in groups] == [3, 3]
    assert all(group.attempt == 2 for group in groups)


async def test_at_the_bound_a_group_is_still_delivered():
    async with world(2, staleness=discard(2)) as w:
        await trio.sleep(10)
        for _ in range(2):
            await bump(w)
        groups = await take_all(w.engine)
    assert [group.oldest_version for group in groups] == [0, 0]


async def test_the_oldest_token_counts_over_all_turns():
    """F061, F076: turn 1 at v0, turn 2 at v2: the group is as old as its first token."""

    async def generate(prompt, rollout):
        first = await rollout.generate(rollout.input)
        await trio.sleep(10)
        return rollout.finish([first, await rollout.generate([*first.prompt_ids, *first.output_ids])])

    async with world(1, generate=generate) as w:
        await trio.sleep(5)
        for _ in range(2):
            await bump(w)
        (group,) = await take_all(w.engine)
    assert (group.oldest_version, group.newest_version) == (0, 2)


async def test_running_groups_that_would_be_discarded_are_cancelled_at_the_new_version():
    async with world(2, plan=lambda n, _: Say(seconds=100 if n < 4 else 1), staleness=discard(0)) as w:
        await trio.sleep(5)
        await bump(w)
        began = trio.current_time()
        assert len(await take_all(w.engine)) == 2
        assert trio.current_time() - began < 10
        assert w.engine.statistics().retries[Cause.STALE] == 4


async def test_a_prompt_that_is_recycled_too_often_is_reported(caplog):
    """F034, with Discard: the slow prompt is named as starved."""
    async with world(1, plan=lambda n, _: Say(seconds=100 if n < 8 else 1), staleness=discard(0, max_recycles=2)) as w:
        await trio.sleep(1)
        for _ in range(4):
            await trio.sleep(101)
            await bump(w)
            with trio.move_on_after(1):
                await w.engine.next_batch(1)
    assert "starved" in caplog.text


async def test_pacing_stops_admission_before_a_group_could_become_too_old():
    """With batches of 2 and a bound of 1, never more than four groups are outstanding."""
    most = 0
    async with world(40, max_running=40, max_ready=40, staleness=Staleness(max_versions=1, policy=Pace())) as w:
        for _ in range(8):
            batch = await w.engine.next_batch(2)
            for group in batch.groups:
                assert w.engine.weight_version - group.oldest_version <= 1
            await batch.ack()
            now = w.engine.statistics()
            most = max(most, now.running + now.ready)
            await trio.sleep(5)
            now = w.engine.statistics()
            most = max(most, now.running + now.ready)
            await bump(w)
    assert 2 <= most <= 4


async def test_pacing_starves_no_slow_prompt_and_delivers_none_too_old():
    """F034, with Pace: the slow prompt is in time, because the batch waits for it."""
    slow = lambda _, prompt: Say(seconds=50 if prompt[2] == 3 else 1)
    seen = []
    async with world(20, plan=slow, max_running=12, staleness=Staleness(max_versions=1, policy=Pace())) as w:
        async for batch in w.engine.batches(2):
            for group in batch.groups:
                assert w.engine.weight_version - group.oldest_version <= 1
                seen.append(group.prompt.id)
            await batch.ack()
            await bump(w)
    assert sorted(seen) == sorted(f"p{n}" for n in range(20))


async def test_pacing_does_not_stop_a_trainer_that_takes_several_batches_a_version():
    async with world(30, staleness=Staleness(max_versions=0, policy=Pace())) as w:
        for _ in range(10):
            await (await w.engine.next_batch(3)).ack()
        assert w.engine.statistics().acked == 30


async def test_a_version_that_a_host_has_set_by_itself_counts_for_staleness():
    """No window was opened: a host updated the servers, and told the engine afterwards."""
    async with world(2, staleness=discard(2)) as w:
        await trio.sleep(10)
        w.servers.set_version(3)
        await w.engine.note_weight_version(3)
        groups = await take_all(w.engine)
        counts = w.engine.statistics()
        await w.engine.note_weight_version(3)  # said twice, it is nothing new
        await w.engine.note_weight_version(1)  # it is the host's word
        assert w.engine.weight_version == 1
        with pytest.raises(TypeError, match="a whole number"):
            await w.engine.note_weight_version("4")
        async with w.engine.weight_update(version=4):
            w.servers.set_version(4)
            with pytest.raises(trio.BusyResourceError):
                await w.engine.note_weight_version(5)
    assert counts.requeues[Cause.STALE] == 2
    assert [group.oldest_version for group in groups] == [3, 3]


async def test_a_group_that_must_be_in_the_next_batch_finds_room_in_a_full_buffer():
    """The consumer waits for the group, so the group must not wait for the consumer."""
    slow_first = lambda number, _: Say(seconds=10 if number == 0 else 1)
    paced = Staleness(max_versions=1)
    async with world(2, plan=slow_first, samples_per_prompt=1, max_ready=1, staleness=paced) as w:
        await trio.sleep(3)
        async with w.engine.weight_update(version=1, mode=PauseMode.IN_PLACE):
            w.servers.set_version(1)
        await trio.sleep(20)
        groups = await take_all(w.engine, 1)
    assert len(groups) == 2


@pytest.mark.parametrize("policy", [Pace(), Discard()])
async def test_a_waiting_consumer_hears_that_what_is_ready_became_too_old(policy):
    """Nothing else runs that could wake it: the group is requeued at once, not when the next one comes."""

    class One:
        def __init__(self):
            self.left = prompts(1)

        async def take(self, count):
            if not self.left:
                await trio.sleep_forever()
            return [self.left.pop()]

        async def give_back(self, prompts):
            pass

        def state(self):
            return {}

    stale = Staleness(max_versions=0, policy=policy)
    async with world(source=One(), samples_per_prompt=1, staleness=stale) as w, trio.open_nursery() as nursery:
        nursery.start_soon(w.engine.next_batch, 2)
        await trio.sleep(3)
        assert w.engine.statistics().ready == 1
        async with w.engine.weight_update(version=1, mode=PauseMode.IN_PLACE):
            w.servers.set_version(1)
        await trio.sleep(5)
        counts = w.engine.statistics()
        nursery.cancel_scope.cancel()
    assert (counts.requeues[Cause.STALE], counts.ready) == (1, 1)


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("windows", [1, 3])
async def test_pacing_keeps_the_bound_though_the_trainer_is_faster_than_it_can_foresee(bound, windows):
    """With versions that jump, or several windows a batch, groups that are too old are requeued, never delivered."""
    ages = []
    async with world(30, plan=lambda *_: Say(seconds=1), staleness=Staleness(max_versions=bound)) as w:
        for _ in range(6):
            batch = await w.engine.next_batch(2)
            ages += [w.engine.weight_version - group.oldest_version for group in batch.groups]
            await batch.ack()
            await trio.sleep(2)
            for _ in range(windows):
                version = w.engine.weight_version + 4
                async with w.engine.weight_update(version=version, mode=PauseMode.IN_PLACE):
                    w.servers.set_version(version)
        await take_all(w.engine)
    assert max(ages) <= bound
