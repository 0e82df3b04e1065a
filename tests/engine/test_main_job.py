"""The main job: prompts in, scored groups out, in batches, until the data ends."""

import pytest
import trio

from trio_rollout import Cause, Retry, Status, Stop
from trio_rollout.errors import EndOfData, EngineClosed, RolloutError, ServerLost, SourceError
from trio_rollout.testing import HANG, Fail, FakeServers, Say

from .conftest import take_all, world


async def test_every_prompt_becomes_one_scored_group():
    """All prompts come out once, with n trajectories in order, each with its reward."""
    async with world(5) as w:
        groups = await take_all(w.engine)
        counts = w.engine.statistics()

    assert sorted(group.prompt.id for group in groups) == [f"p{n}" for n in range(5)]
    for group in groups:
        assert [row.index for row in group.trajectories] == [0, 1]
        assert all(row.reward == 1.0 and row.status is Status.COMPLETED for row in group.trajectories)
        assert all(row.stop is Stop.STOP and row.segments[0].response_length == 4 for row in group.trajectories)
    assert (counts.pulled, counts.acked, counts.waiting, counts.running) == (5, 5, 0, 0)


async def test_the_last_batch_is_smaller_and_then_the_data_ends():
    """5 groups in batches of 4: 4, then 1, then EndOfData (F011)."""
    async with world(5) as w:
        sizes = [len((await w.engine.next_batch(4)).groups) for _ in range(2)]
        with pytest.raises(EndOfData):
            await w.engine.next_batch(4)

    assert sizes == [4, 1]


async def test_steps_grow_by_one_a_batch():
    async with world(6) as w:
        assert [(await w.engine.next_batch(2)).step for _ in range(3)] == [0, 1, 2]


async def test_no_more_rollouts_run_than_there_are_slots():
    """max_running counts rollouts, and all of them are used."""
    async with world(20, max_running=5) as w:
        await take_all(w.engine)
        assert w.servers.most_running == 4  # two whole groups of two


async def test_surplus_groups_stay_for_the_next_call():
    """F001: ten groups, calls for 4, 4 and 2 give all ten, once each."""
    async with world(10, max_ready=10) as w:
        batches = [await w.engine.next_batch(size) for size in (4, 4, 2)]

    ids = [group.prompt.id for batch in batches for group in batch.groups]
    assert sorted(ids) == sorted(f"p{n}" for n in range(10))


async def test_a_full_buffer_stops_admission_and_never_overflows():
    """F018: finished groups wait for room with their slots given back; none is lost."""
    async with world(12, max_ready=2, max_running=8) as w:
        await trio.sleep(100)
        counts = w.engine.statistics()
        assert counts.ready == 2
        assert counts.running_rollouts == 0
        assert w.servers.calls < 12 * 2
        assert len(await take_all(w.engine)) == 12


async def test_groups_that_wait_for_their_groups_reward_stop_admission_as_finished_ones_do():
    """A judge that is slower than the servers would pile up groups without end."""

    async def judge(group):
        await trio.sleep(200)
        return [1.0] * len(group.trajectories)

    async with world(40, max_ready=2, max_running=8, reward=None, group_reward=judge) as w:
        await trio.sleep(150)
        assert w.engine.statistics().running == 4
        assert w.servers.calls == 8
        assert len(await take_all(w.engine)) == 40


async def test_a_group_that_failed_and_waits_to_run_again_does_not_count_as_finished():
    async def judge(group):
        if group.prompt.id == "p0":
            await trio.sleep_forever()
        return [1.0] * len(group.trajectories)

    how = {"retry": Retry(max_attempts=2, backoff_base=1000.0, backoff_max=1000.0), "deadlines": {"group": 5.0}}
    async with world(4, max_ready=1, max_running=2, reward=None, group_reward=judge, **how) as w:
        began = trio.current_time()
        assert len((await w.engine.next_batch(1)).groups) == 1
        assert trio.current_time() - began < 100


async def test_groups_that_wait_to_run_again_bound_what_is_pulled():
    """While everything fails, the source is not drained: as many groups may back off as could run, and as many again run."""
    slow = Retry(max_attempts=1000, max_free=1000, backoff_base=600.0, backoff_max=600.0)
    async with world(1000, plan=lambda *_: Fail(ServerLost("gone"), 1.0), max_running=8, retry=slow) as w:
        await trio.sleep(100)
        assert 4 <= w.engine.statistics().pulled <= 12


async def test_a_batch_larger_than_the_buffer_raises_its_bound():
    async with world(6, max_ready=2) as w:
        assert len((await w.engine.next_batch(6)).groups) == 6


async def test_a_failed_rollout_is_tried_again_and_its_sibling_goes_on():
    """F005, F006: one exception costs one try of one sample."""
    async with world(3, plan=lambda n, _: Fail(ValueError("x"), 0.1) if n == 0 else Say(seconds=5)) as w:
        groups = await take_all(w.engine)
        counts = w.engine.statistics()

    assert len(groups) == 3
    assert counts.retries[Cause.ERROR] == 1
    assert not any(counts.requeues.values())
    assert w.servers.aborts == 0
    assert [group.attempt for group in groups] == [1, 1, 1]


async def test_a_group_that_always_fails_is_quarantined_with_its_last_error():
    """The other groups are delivered; the report keeps type, message and traceback."""

    def plan(_, prompt):
        return Fail(ValueError("broken prompt")) if prompt[2] == 4 else Say()

    async with world(4, plan=plan) as w:
        groups = await take_all(w.engine)
        (report,) = w.engine.quarantined()

    assert len(groups) == 3
    assert (report.id.prompt, report.attempts, report.cause) == ("p1", 3, Cause.ERROR)
    assert (report.error.type, report.error.message) == ("ValueError", "broken prompt")
    assert "ValueError: broken prompt" in report.error.traceback


async def test_a_hung_group_is_requeued_at_its_deadline_and_frees_its_slots():
    """F004: two of the first groups never answer; everything else goes on, and they succeed at the second attempt."""
    async with world(10, plan=lambda n, _: HANG if n < 4 else Say(), deadlines={"group": 10.0}) as w:
        groups = await take_all(w.engine)
        counts = w.engine.statistics()

    assert len(groups) == 10
    assert counts.requeues[Cause.DEADLINE] == 2
    assert sorted(group.attempt for group in groups)[-2:] == [2, 2]


async def test_a_hung_turn_is_cut_at_the_turns_deadline():
    async with world(2, plan=lambda n, _: HANG if n == 0 else Say(), deadlines={"turn": 3.0}) as w:
        began = trio.current_time()
        assert len(await take_all(w.engine)) == 2
        assert trio.current_time() - began < 10
        assert w.engine.statistics().retries[Cause.DEADLINE] == 1


@pytest.mark.parametrize("off", [None, 0, -1])
async def test_without_a_deadline_a_long_group_is_not_cut(off):
    """None and numbers up to zero switch the bound off, not the exception safety."""
    plan = lambda n, _: Fail(ValueError("x")) if n == 0 else Say(seconds=10_000)
    async with world(2, plan=plan, deadlines={"group": off, "turn": off}) as w:
        assert len(await take_all(w.engine)) == 2


async def test_everything_failing_stops_the_run_with_the_last_message():
    """F009: the consumer is told after failure_budget groups, not after an empty wait."""
    async with world(50, plan=lambda *_: Fail(ValueError("all GPUs are gone")), failure_budget=3) as w:
        with pytest.raises(RolloutError, match="all GPUs are gone"):
            await w.engine.next_batch(1)
        assert w.engine.statistics().quarantined >= 3


async def test_one_bad_prompt_in_ten_does_not_use_up_the_failure_budget():
    def plan(_, prompt):
        return Fail(ValueError("bad")) if prompt[2] % 10 == 3 else Say()

    async with world(40, plan=plan, failure_budget=2) as w:
        assert len(await take_all(w.engine)) == 36


async def test_a_broken_source_reaches_the_consumer_at_once():
    """F002: the error is the consumer's next answer, with its cause."""

    class Broken:
        async def take(self, count):
            raise OSError("disk gone")

        async def give_back(self, prompts):
            raise AssertionError("nothing was taken")

        def state(self):
            return {}

    async with world(source=Broken()) as w:
        with pytest.raises(RolloutError, match="disk gone") as caught:
            await w.engine.next_batch(1)
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("error", [EndOfData("mine"), EngineClosed("mine")])
async def test_a_source_that_raises_what_ends_a_run_has_failed_all_the_same(error):
    class Odd:
        async def take(self, count):
            await trio.sleep(1)
            raise error

        def state(self):
            return {}

    async with world(source=Odd()) as w:
        with pytest.raises(SourceError, match="mine"):
            await take_all(w.engine)


async def test_a_failure_that_no_call_has_told_is_raised_on_leaving():
    with pytest.raises(RolloutError, match="hopeless"):
        async with world(50, plan=lambda *_: Fail(ValueError("hopeless")), failure_budget=1):
            await trio.sleep(60)


async def test_cancelled_next_batch_has_taken_nothing():
    async with world(3, plan=lambda n, _: Say(seconds=5 if n < 4 else 50)) as w:
        with trio.move_on_after(10) as scope:
            await w.engine.next_batch(3)
        assert scope.cancelled_caught
        assert w.engine.statistics().ready == 2
        assert len((await w.engine.next_batch(3)).groups) == 3


async def test_after_leaving_every_call_is_refused():
    async with world(1) as w:
        pass
    with pytest.raises(EngineClosed):
        await w.engine.next_batch(1)


async def test_the_bodys_own_exception_comes_out_as_itself():
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with world(3):
            raise error
    assert caught.value is error


async def test_a_group_of_the_users_is_not_unwrapped():
    error = ExceptionGroup("theirs", [ValueError("a")])
    with pytest.raises(ExceptionGroup) as caught:
        async with world(3):
            raise error
    assert caught.value is error


async def test_cancelled_from_outside_the_engine_leaves_nothing_running():
    servers = FakeServers(plan=lambda *_: HANG)
    with trio.move_on_after(5) as scope:
        async with world(4, servers=servers) as w:
            await w.engine.next_batch(1)
    assert scope.cancelled_caught
    assert servers.running == 0
    assert w.engine.statistics().returned == w.engine.statistics().pulled


async def test_a_requeued_group_waits_behind_what_was_waiting_and_before_what_was_never_pulled():
    """F035: cancelled work does not go straight back into the slot it freed."""
    order = []

    def plan(number, prompt):
        order.append(f"p{prompt[2] - 3}")
        return HANG if number == 0 else Say()

    fast = Retry(backoff_base=0.0)
    async with world(8, plan=plan, samples_per_prompt=1, max_running=1, retry=fast, deadlines={"group": 5.0}) as w:
        await take_all(w.engine, 1)

    assert order[0] == "p0"
    assert 2 <= order.index("p0", 1) <= 3  # behind the one prompt that was pulled ahead, before p3


async def test_a_sample_that_is_tried_again_comes_before_groups_that_have_not_started():
    """Its group is the older one, and its finished siblings wait for it."""
    order = []

    def plan(number, prompt):
        order.append(f"p{prompt[2] - 3}")
        return Fail(ValueError("once"), 1.0) if number == 0 else Say(seconds=5)

    fast = Retry(backoff_base=0.5, jitter=0.0)
    async with world(8, plan=plan, samples_per_prompt=1, max_running=1, retry=fast) as w:
        await take_all(w.engine, 1)

    assert order[:3] == ["p0", "p1", "p0"], "while it rested, the next group had its slot"


async def test_a_sample_that_waits_gets_the_next_slot_however_the_tasks_are_scheduled():
    """Every third sample fails once. Until it runs again, only those start that find a slot while it rests."""
    order = []

    def plan(number, prompt):
        name = int(prompt[2]) - 3
        order.append(name)
        return Fail(ValueError("once"), 1.0) if name % 3 == 0 and order.count(name) == 1 else Say(seconds=5)

    fast = Retry(backoff_base=0.5, jitter=0.0)
    async with world(24, plan=plan, samples_per_prompt=1, max_running=2, max_ready=24, retry=fast) as w:
        await take_all(w.engine, 1)

    first = {name: order.index(name) for name in range(0, 24, 3)}
    assert all(order.index(name, at + 1) - at <= 3 for name, at in first.items()), order


async def test_each_finished_rollout_frees_its_slot_at_once():
    """The long rollout of the first group does not keep the slot of its short sibling."""
    async with world(3, plan=lambda n, _: Say(seconds=100 if n == 0 else 1), max_running=3) as w:
        await trio.sleep(1.5)
        assert w.engine.statistics().running == 2
        assert w.servers.calls == 4
