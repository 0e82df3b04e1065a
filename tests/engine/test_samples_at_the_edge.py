"""Samples where the rules of tries, deadlines, staleness and the ledger meet."""

import attrs
import pytest
import trio

from trio_rollout import Cause, Failure, PauseMode, Retry, Staleness
from trio_rollout._core.lifecycle import State
from trio_rollout.errors import FailedElsewhere, InfrastructureError, SandboxLost
from trio_rollout.sources import IterableSource
from trio_rollout.testing import Say, prompts
from trio_rollout.testing._sim.disk import SimDisk
from trio_rollout.testing._sim.files import SimFiles

from .conftest import take_all, world
from .test_restarts import Killed, Runs


async def test_an_unscored_sample_that_the_ledger_refuses_costs_its_group_only():
    """The group is quarantined without its unscored trajectory, and the run goes on."""

    async def generate(prompt, rollout):
        made = rollout.finish([await rollout.generate(rollout.input)])
        return attrs.evolve(made, metadata={"not": object()}) if prompt.id == "p0" else made

    async def reward(trajectory):
        if trajectory.prompt.id == "p0":
            raise ValueError("cannot be scored")
        return 1.0

    async with Runs(count=3).open(generate=generate, reward=reward) as w:
        groups = await take_all(w.engine)
        assert len(groups) == 2
        assert w.engine.statistics().quarantined == 1


@pytest.mark.parametrize("which", ["group_reward", "group_filter"])
async def test_a_group_reward_that_never_answers_ends_by_max_attempts(which):
    """The group's deadline charges no finished sample, so the attempts themselves are counted."""
    calls = 0

    async def hang(group):
        nonlocal calls
        calls += 1
        if calls > 50:
            raise KeyError("tried 50 times")
        await trio.sleep_forever()

    async with world(1, deadlines={"group": 20, "reward": None}, **{which: hang}) as w:
        assert await take_all(w.engine) == []
    assert calls <= 3


async def test_infrastructure_that_fails_after_each_first_turn_backs_off_and_ends():
    calls = 0

    async def generate(prompt, rollout):
        nonlocal calls
        calls += 1
        await rollout.generate(rollout.input)
        raise SandboxLost("this image never works")

    with trio.move_on_after(24 * 3600):
        async with world(
            1,
            generate=generate,
            samples_per_prompt=1,
            plan=lambda *_: Say(seconds=1),
            deadlines={"group": None},
            retry=Retry(),
        ) as w:
            await take_all(w.engine)
    assert calls < 5000


async def test_pace_a_resting_sample_holds_up_no_batch():
    """Its finished sibling would make the group due, and the trainer would wait for it for ever."""

    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input)
        if prompt.id == "p0" and rollout.index == 1:
            raise InfrastructureError("no machine for this one")
        return rollout.finish([turn])

    async with world(20, generate=generate, staleness=Staleness(max_versions=1), max_running=8, retry=Retry()) as w:
        await (await w.engine.next_batch(2)).ack()
        async with w.engine.weight_update(version=1):
            w.servers.version = 1
        begin = trio.current_time()
        with trio.move_on_after(600) as limit:
            await w.engine.next_batch(2)
        assert not limit.cancelled_caught, w.engine.statistics()
        assert trio.current_time() - begin < 60


@pytest.mark.parametrize("staleness", [Staleness(max_versions=0), Staleness(spread=0)], ids=str)
async def test_an_evaluation_ends_while_weights_move(staleness):
    """An evaluation knows nothing of staleness: its finished samples are not dropped with each version."""
    async with world(0, plan=lambda *_: Say(seconds=3), staleness=staleness, max_running=2) as w:

        async def update():
            version = 0
            while True:
                await trio.sleep(4)
                version += 1
                async with w.engine.weight_update(version=version):
                    w.servers.set_version(version)

        with trio.move_on_after(1000) as limit:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(update)
                await w.engine.evaluate(IterableSource(prompts(1)), samples_per_prompt=6)
                nursery.cancel_scope.cancel()
        assert not limit.cancelled_caught


async def test_spread_with_retract_says_so_when_no_sample_can_hold_it():
    """Each sample spans more versions than ``spread``; after ``max_free`` of them the group is given up."""
    async with world(
        1, plan=lambda *_: Say(tokens=8, seconds=8), staleness=Staleness(spread=0), deadlines={"group": None}
    ) as w:

        async def update():
            version = 0
            while True:
                await trio.sleep(5)
                version += 1
                async with w.engine.weight_update(version=version, mode=PauseMode.RETRACT):
                    w.servers.set_version(version)

        with trio.move_on_after(5000) as limit:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(update)
                await take_all(w.engine)
                nursery.cancel_scope.cancel()
        assert not limit.cancelled_caught, w.engine.statistics()


async def counts_after_a_kill(runs, **changes):
    """Return the tries of the first sample as the next run would find them, if the process were killed now."""
    copy = Runs(disk=SimDisk(SimFiles.holding(runs.disk.files.contents())), count=runs.count)
    async with copy.open(**changes) as again:
        (entry,) = again.engine._state.book.entries(*State)
        counts = entry.samples[0].counts
        await again.engine.drain(0)
    return counts


async def test_tries_are_not_set_back_by_a_record_that_comes_late():
    """``Requeued`` is written at once; a ``SamplesTried`` that was noted before it has older counts."""

    async def generate(prompt, rollout):
        if rollout.attempt == 1:
            await trio.sleep(9.95)
            raise ValueError("once")
        await trio.sleep_forever()

    runs, retry = Runs(count=1), Retry(max_attempts=5, backoff_base=0.01, jitter=0)
    changes = {"generate": generate, "samples_per_prompt": 1, "retry": retry, "deadlines": {"group": 10}}
    async with runs.open(**changes) as w:
        await trio.sleep(12)
        (live,) = w.engine._state.book.entries(*State)
        assert live.samples[0].counts.attempts == 2
        assert (await counts_after_a_kill(runs, **changes)).attempts == 2
        await w.engine.drain(0)


async def test_a_sample_that_failed_for_good_stays_so_after_a_restart():
    """With ``min_samples`` the group goes on, so the end of the sample must be in the ledger."""

    async def generate(prompt, rollout):
        if rollout.index:
            await trio.sleep_forever()
        return rollout.finish([await rollout.generate(rollout.input)])

    async def reward(trajectory):
        raise ValueError("never")

    runs, tries = Runs(count=1), []
    for _ in range(4):
        with pytest.raises(Killed):
            async with runs.open(generate=generate, reward=reward, min_samples=1) as w:
                await trio.sleep(20)
                (entry,) = w.engine._state.book.entries(*State)
                tries.append(entry.samples[0].counts.tries)
                raise Killed
    assert tries == [1, 1, 1, 1]


@pytest.mark.parametrize("schedule", range(6))  # the order of tasks is drawn from the test's name
async def test_leaving_writes_the_samples_that_are_finished(schedule):
    """Leaving waits until what is pending is on disk, whatever the order of the tasks."""

    async def generate(prompt, rollout):
        if rollout.index:
            await trio.sleep_forever()
        return rollout.finish([await rollout.generate(rollout.input)])

    runs = Runs(count=1)
    with pytest.raises(Killed):
        async with runs.open(generate=generate) as w:
            while not w.engine.statistics().tokens.kept:
                await trio.sleep(0.01)
            raise Killed
    async with runs.open(generate=generate) as w:
        assert w.engine.statistics().tokens.kept > 0


async def test_a_quarantined_group_keeps_its_finished_samples():
    """What is pending is written before the quarantine: afterwards a sample of the group would be ignored."""

    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input)
        if rollout.index == 1:
            await trio.sleep(0.05)
            raise ValueError("always")
        return rollout.finish([turn])

    runs = Runs(count=1)
    async with runs.open(generate=generate, retry=Retry(max_attempts=1), plan=lambda *_: Say(seconds=0.01)) as w:
        assert await take_all(w.engine) == []
        assert w.engine.statistics().quarantined == 1
    assert len(list(runs.disk.connect().execute("SELECT * FROM samples"))) == 1


async def test_an_outage_of_infrastructure_is_not_charged_as_the_groups_deadline():
    """A sample that rests in an outage is not charged when its group's deadline passes."""
    begin = trio.current_time()

    async def generate(prompt, rollout):
        if trio.current_time() < begin + 900:
            raise SandboxLost("outage")
        return rollout.finish([await rollout.generate(rollout.input)])

    async with world(4, generate=generate, retry=Retry(), deadlines={"group": 300}) as w:
        assert len(await take_all(w.engine)) == 4


async def test_a_call_that_outlives_its_try_leaves_no_token_in_flight():
    async with trio.open_nursery() as outside:

        async def generate(prompt, rollout):
            turn = await rollout.generate(rollout.input)
            outside.start_soon(rollout.generate, rollout.input)
            await trio.sleep(0.01)
            return rollout.finish([turn])

        async with world(1, generate=generate, plan=lambda *_: Say(seconds=1), samples_per_prompt=1) as w:
            await take_all(w.engine)
            await trio.sleep(10)
            now = w.engine.statistics()
        assert now.tokens.in_flight == 0


async def test_tokens_of_another_client_are_counted_and_are_progress():
    """``Retry.max_free`` bounds failures without a new token; noted ones are new, and wasted with their try."""
    left = [SandboxLost("gone")] * 5

    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input) if not left else None
        rollout.note_tokens(3)
        assert rollout.new_tokens == (3 if left else 3 + 4)
        if left:
            raise left.pop()
        return rollout.finish([turn])

    retry = Retry(max_free=1, backoff_base=0.01, backoff_max=0.01)
    async with world(1, generate=generate, samples_per_prompt=1, retry=retry) as w:
        assert len(await take_all(w.engine)) == 1
        counts = w.engine.statistics()
    assert (counts.tokens.delivered, counts.tokens.wasted) == (3 + 4, {Cause.INFRASTRUCTURE: 5 * 3})
    assert counts.generated_tokens == 6 * 3 + 4


@pytest.mark.parametrize("cause", [Cause.DEADLINE, Cause.SERVER_ABORT, Cause.INFRASTRUCTURE, Cause.ERROR])
async def test_a_failure_of_another_engine_is_counted_as_it_judged_it(cause):
    failure = Failure(cause=cause, type="Foreign", message="there", traceback="far away")
    left = [FailedElsewhere("a lease", failure=failure)]

    async def generate(prompt, rollout):
        if rollout.index == 1 and left:
            raise left.pop()
        return rollout.finish([await rollout.generate(rollout.input)])

    async with world(1, generate=generate) as w:
        assert len(await take_all(w.engine)) == 1
        retries = w.engine.statistics().retries
    assert {each: count for each, count in retries.items() if count} == {cause: 1}


async def test_a_failure_of_another_engine_that_nothing_can_help_ends_its_group_at_once():
    failure = Failure(cause=Cause.ERROR, type="Foreign", message="there", traceback="far away")

    async def generate(prompt, rollout):
        raise FailedElsewhere("a lease", failure=failure, permanent=True)

    async with world(1, generate=generate) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert (report.attempts, report.error.type, report.error.traceback) == (1, "Foreign", "far away")
    assert (report.error.group, report.error.attempt) == (report.id, 1)
