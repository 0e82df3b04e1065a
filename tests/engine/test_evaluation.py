"""Evaluation beside production."""

import pytest
import trio

from trio_rollout import Cause, PauseMode, Prompt, Retry, SamplingParams, SingleTurn, Status
from trio_rollout.errors import EngineClosed, RequestRejected, RolloutError, SandboxLost, SourceError
from trio_rollout.sources import IterableSource
from trio_rollout.testing import HANG, Fail, FakeServers, Say, prompts

from .conftest import take_all, world


def held_out(count):
    return IterableSource(prompts(count, prefix="eval"))


async def test_every_prompt_comes_back_in_order_and_training_counts_stay():
    async with world(4) as w:
        groups = await w.engine.evaluate(held_out(5), samples_per_prompt=3)
        counts = w.engine.statistics()
        assert [group.prompt.id for group in groups] == [f"eval{n}" for n in range(5)]
        assert all(len(group.trajectories) == 3 for group in groups)
        assert counts.pulled <= 4
        assert len(await take_all(w.engine)) == 4


async def test_it_runs_although_training_holds_every_slot():
    """F066."""
    plan = lambda _, prompt: Say() if prompt[1] == 9 else HANG
    async with world(4, plan=plan) as w:
        await trio.sleep(1)
        source = IterableSource([Prompt(id="e", input_ids=[1, 9, 9])])
        (group,) = await w.engine.evaluate(source)
        assert group.trajectories[0].status is Status.COMPLETED


async def test_what_one_sample_raised_is_its_own_error_and_its_siblings_go_on():

    async def generate(prompt, rollout):
        if rollout.index == 1:
            raise ValueError("only here")
        return rollout.finish([await rollout.generate(rollout.input)])

    async with world(0) as w:
        (group,) = await w.engine.evaluate(held_out(1), generate, samples_per_prompt=3)
    assert [row.status for row in group.trajectories] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert [row.index for row in group.trajectories] == [0, 1, 2]
    assert (group.trajectories[1].error.cause, group.trajectories[1].error.message) == (Cause.ERROR, "only here")


async def test_input_that_no_server_takes_fails_the_samples_that_are_not_finished():
    """Cause SIBLING does not hide the failure: it names the sample that was refused."""

    async def generate(prompt, rollout):
        if rollout.index == 1:
            raise RequestRejected("too long")
        await trio.sleep_forever()

    async with world(0) as w:
        (group,) = await w.engine.evaluate(held_out(1), generate, samples_per_prompt=3)
    errors = [row.error for row in group.trajectories]
    assert [error.cause for error in errors] == [Cause.SIBLING, Cause.ERROR, Cause.SIBLING]
    assert "sample 1 failed first" in errors[0].message
    assert "too long" in errors[0].message


async def test_a_sample_that_failed_before_the_input_was_refused_is_a_row_too():
    """Each sample has a row with its own failure, whichever of two ends came first."""

    async def generate(prompt, rollout):
        if rollout.index == 0:
            raise ValueError("never works")
        if rollout.index == 1:
            return rollout.finish([await rollout.generate(rollout.input)])
        await trio.sleep(10)
        raise RequestRejected("too long")

    async with world(0) as w:
        (group,) = await w.engine.evaluate(held_out(1), generate, samples_per_prompt=3)
    assert [row.index for row in group.trajectories] == [0, 1, 2]
    assert [row.status for row in group.trajectories] == [Status.FAILED, Status.COMPLETED, Status.FAILED]
    assert [row.error and row.error.message for row in group.trajectories] == ["never works", None, "too long"]


async def test_f102_infrastructure_costs_a_sample_of_an_evaluation_alone():
    calls = []

    async def generate(prompt, rollout):
        calls.append(rollout.index)
        turn = await rollout.generate(rollout.input)
        if rollout.index == 2 and calls.count(2) < 6:
            raise SandboxLost("gone")
        return rollout.finish([turn])

    async with world(0) as w:
        (group,) = await w.engine.evaluate(held_out(1), generate, samples_per_prompt=4)
        counts = w.engine.statistics()
    assert [row.status for row in group.trajectories] == [Status.COMPLETED] * 4
    assert sorted(calls) == [0, 1, *[2] * 6, 3]
    seen = counts.evaluations
    assert (seen.rollouts, seen.retries[Cause.INFRASTRUCTURE], sum(seen.retries.values())) == (9, 5, 5)
    assert (seen.tokens.delivered, seen.tokens.wasted) == (4 * 4, {Cause.INFRASTRUCTURE: 5 * 4})
    assert (counts.rollouts, counts.generated_tokens, sum(counts.retries.values())) == (0, 0, 0)


async def test_the_tokens_of_a_cancelled_evaluation_are_wasted():
    plan = lambda number, _: HANG if number == 2 else Say()
    async with world(0, plan=plan) as w:
        with trio.move_on_after(5):
            await w.engine.evaluate(held_out(1), samples_per_prompt=3)
        tokens = w.engine.statistics().evaluations.tokens
    assert (tokens.in_flight, tokens.kept, tokens.delivered) == (0, 0, 0)
    assert tokens.wasted == {Cause.CANCELLED: 2 * 4}


async def test_f102_the_groups_deadline_keeps_the_finished_samples_of_an_evaluation():
    calls = []

    async def generate(prompt, rollout):
        calls.append(rollout.index)
        turn = await rollout.generate(rollout.input)
        if rollout.index == 1:
            await trio.sleep_forever()
        return rollout.finish([turn])

    async with world(0, deadlines={"group": 20}, retry=Retry(max_attempts=2, backoff_base=0.01)) as w:
        (group,) = await w.engine.evaluate(held_out(1), generate, samples_per_prompt=3)
    assert [row.status for row in group.trajectories] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert group.trajectories[1].error.cause is Cause.DEADLINE
    assert sorted(calls) == [0, 1, 1, 2]


@pytest.mark.parametrize("whose", ["one sample's", "the group's"])
async def test_a_row_whose_scorer_failed_is_failed_and_has_its_tokens(whose):
    async def reward(trajectory):
        if trajectory.index == 1 and whose == "one sample's":
            raise ValueError("no such column")
        return 1.0

    async def group_reward(group):
        raise ValueError("no such column")

    more = {"group_reward": group_reward} if whose == "the group's" else {}
    async with world(0, reward=reward, **more) as w:
        (group,) = await w.engine.evaluate(held_out(1), samples_per_prompt=3)
    failed = [1] if whose == "one sample's" else [0, 1, 2]
    assert [row.index for row in group.trajectories] == [0, 1, 2]
    assert [row.index for row in group.trajectories if row.status is Status.FAILED] == failed
    assert {row.error.message for row in group.trajectories if row.index in failed} == {"no such column"}
    assert all(row.segments[0].response_length == 4 for row in group.trajectories)


async def test_a_prompt_that_failed_for_good_is_failed_not_missing():
    """F075."""
    plan = lambda _, prompt: Fail(ValueError("bad")) if prompt[2] == 4 else Say()
    async with world(0, plan=plan) as w:
        groups = await w.engine.evaluate(held_out(3), samples_per_prompt=2)
    assert [group.trajectories[0].status for group in groups] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert all("bad" in row.error.message for row in groups[1].trajectories)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_window_restarts_what_it_interrupts(mode):
    async with world(0, plan=lambda *_: Say(tokens=8, seconds=8)) as w, trio.open_nursery() as nursery:
        found = []

        async def evaluate():
            found.extend(await w.engine.evaluate(held_out(2)))

        nursery.start_soon(evaluate)
        await trio.sleep(4)
        async with w.engine.weight_update(version=1, mode=mode):
            w.servers.set_version(1)
    assert [(group.oldest_version, group.newest_version) for group in found] == [(1, 1)] * 2


async def test_its_own_sampling():
    seen = []

    class Noting(FakeServers):
        async def generate(self, input_ids, sampling, **more):
            seen.append(sampling.temperature)
            return await super().generate(input_ids, sampling, **more)

    async with world(0, servers=Noting()) as w:
        await w.engine.evaluate(held_out(1), SingleTurn(SamplingParams(temperature=0.0)))
    assert seen == [0.0]


async def test_it_hears_of_the_engines_failure():
    plan = lambda _, prompt: HANG if prompt[1] == 9 else Fail(ValueError("all broken"), 1.0)
    async with world(20, plan=plan, failure_budget=2) as w:
        with pytest.raises(RolloutError, match="all broken"):
            await w.engine.evaluate(IterableSource([Prompt(id="e", input_ids=[1, 9, 9])]))


async def test_after_a_failure_that_was_told_it_refuses_and_gives_no_part_of_the_groups():
    async with world(20, plan=lambda *_: Fail(ValueError("all broken"), 1.0), failure_budget=2) as w:
        with pytest.raises(RolloutError, match="all broken"):
            await w.engine.next_batch(2)
        with pytest.raises(RolloutError, match="all broken"):
            await w.engine.evaluate(held_out(2))


async def test_what_its_source_raises_comes_out_as_it_is():
    class Broken:
        async def take(self, count):
            await trio.sleep(1)
            raise OSError("no such file")

    async with world(0) as w:
        with pytest.raises(OSError, match="no such file"):
            await w.engine.evaluate(Broken())


async def test_two_prompts_of_one_id_are_refused_not_made_one():
    async with world(0) as w:
        with pytest.raises(SourceError, match="'p0'"):
            await w.engine.evaluate(IterableSource([*prompts(2), *prompts(1)]))


async def test_cancelled_it_leaves_training_alone():
    """F078."""
    plan = lambda _, prompt: HANG if prompt[1] == 9 else Say()
    async with world(6, plan=plan) as w:
        with trio.move_on_after(3):
            await w.engine.evaluate(IterableSource([Prompt(id="e", input_ids=[1, 9, 9])]))
        assert len(await take_all(w.engine)) == 6
        assert w.engine.statistics().retries[Cause.CANCELLED] == 0


async def test_it_ends_with_the_engine_though_another_task_waits_for_it():
    heard = []

    async def evaluate(engine):
        with pytest.raises(EngineClosed, match="evaluate"):
            await engine.evaluate(held_out(2))
        heard.append(trio.current_time())

    async with trio.open_nursery() as outside:
        async with world(0, plan=lambda *_: HANG, deadlines={"group": None, "turn": None}) as w:
            outside.start_soon(evaluate, w.engine)
            await trio.sleep(1)
            began = trio.current_time()
        assert w.servers.running == 0
    assert heard[0] - began < 1


async def test_it_goes_on_while_the_engine_drains_and_can_begin_after_a_drain():
    groups = []

    async def evaluate(engine):
        groups.extend(await engine.evaluate(held_out(2)))

    async with world(4, plan=lambda *_: Say(seconds=10)) as w, trio.open_nursery() as nursery:
        nursery.start_soon(evaluate, w.engine)
        await trio.sleep(1)
        await w.engine.drain(grace=0)
        groups.extend(await w.engine.evaluate(held_out(1)))
    assert len(groups) == 3
    assert {row.status for group in groups for row in group.trajectories} <= {Status.COMPLETED, Status.TRUNCATED}


async def test_its_slots_are_counted_in_rollouts():
    """As many as training has, whatever the number of samples; of more samples than that the others wait."""
    for samples, most in ((1, 8), (3, 6), (16, 8)):
        async with world(0, plan=lambda *_: Say(seconds=1), max_running=8) as w:
            await w.engine.evaluate(held_out(12), samples_per_prompt=samples)
            assert w.servers.most_running == most
