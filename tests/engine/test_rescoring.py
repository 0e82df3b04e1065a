"""What a ledger has stored is scored again without sampling: what is written where, and that it may end at any moment."""

import random

import attrs
import pytest
import trio

from trio_rollout import Cause, Drop, Keep, Prompt, Retry, rescore
from trio_rollout._core.lifecycle import State
from trio_rollout.errors import LedgerError
from trio_rollout.ledger import RESCORED_STATES, open_ledger
from trio_rollout.sources import IterableSource
from trio_rollout.testing import HANG, Fail, Say, cancel_everywhere, prompts, throw_everywhere
from trio_rollout.testing._sim.disk import disk_full_from
from trio_rollout.testing._sim.world import SimIO

from .conftest import QUICK, settings, take_all, world
from .test_restarts import Killed, Runs

QUARANTINED, READY, WAITING = State.QUARANTINED, State.READY, State.WAITING


async def half(trajectory):
    """The new reward."""
    return 0.5


async def broken(trajectory):
    """A programming error."""
    raise KeyError(trajectory.prompt.id)


def in_a_second(*_):
    """A plan: all answers take as long."""
    return Say(seconds=1)


def failing_for(*names):
    """A reward that fails for these prompts, and is the number of the sample for all others."""

    async def reward(trajectory):
        if trajectory.prompt.id in names:
            raise KeyError("no such key")
        return float(trajectory.index)

    return reward


def ledger_of(runs, **changes):
    return open_ledger("sim", keep_acked=True, disk=runs.disk, io=SimIO(rng=random.Random(1)), **changes)


async def rescored(runs, *functions, **changes):
    """Rescore the ledger and return the report."""
    async with ledger_of(runs) as ledger:
        return await rescore(ledger, *functions, **{"settings": settings(), **changes})


async def stored(runs):
    """Return the state and the rewards of each group, by prompt."""
    async with ledger_of(runs) as ledger:
        groups = await ledger.stored_after(-1, 1_000_000, RESCORED_STATES, 1_000)
    return {one.prompt.id: (one.state, [row.reward for row in one.trajectories]) for one in groups}


async def lived(count=3, **changes):
    """Return the disk of a run to the end of its data, with every group acked or quarantined; ``changes`` are the engine's."""
    runs = Runs(count=count)
    async with runs.open(keep_acked=True, **changes) as w:
        await take_all(w.engine, size=1)
    return runs


async def test_a_quarantined_group_that_only_lacked_scores_becomes_ready_and_the_next_run_delivers_it():
    """F105: what was sampled for a scorer that fails is scored again later."""
    runs = await lived(reward=broken, plan=in_a_second)
    assert await stored(runs) == dict.fromkeys(("p0", "p1", "p2"), (QUARANTINED, [None, None]))

    report = await rescored(runs, half)

    assert (report.scored, report.ready, report.failed) == (3, 3, ())
    assert await stored(runs) == dict.fromkeys(("p0", "p1", "p2"), (READY, [0.5, 0.5]))
    async with runs.open(plan=lambda *_: HANG) as w:
        batch = await w.engine.next_batch(3)
        assert [group.prompt.id for group in batch.groups] == ["p0", "p1", "p2"]
        assert [row.reward for group in batch.groups for row in group.trajectories] == [0.5] * 6
        assert w.servers.calls == 0


async def test_a_group_that_misses_samples_stays_quarantined_with_new_rewards_and_a_retry_runs_only_those():
    """The scorer of sample 0 fails while sample 1 still samples."""
    calls = []

    def plan(number, _):
        calls.append(number)
        return Say(seconds=1) if number == 0 else Say(seconds=9)

    async def fails(trajectory):
        raise KeyError("no such key")

    runs = await lived(count=1, plan=plan, reward=fails)
    assert len(calls) == 2
    assert (await stored(runs))["p0"] == (QUARANTINED, [None])

    report = await rescored(runs, half)

    assert (report.scored, report.unfinished, report.ready) == (1, 1, 0)
    assert (await stored(runs))["p0"] == (QUARANTINED, [0.5])
    async with runs.open(retry_quarantined=True, reward=half) as w:
        (group,) = await take_all(w.engine)
        assert w.servers.calls == 1
    assert [row.reward for row in group.trajectories] == [0.5, 0.5]


async def test_finished_groups_get_new_rewards_in_their_state_and_none_is_delivered_again():
    runs = Runs(count=4)
    with pytest.raises(Killed):
        async with runs.open(keep_acked=True, reward=failing_for()) as w:
            first, second = await w.engine.next_batch(1), await w.engine.next_batch(1)
            await first.ack()
            while w.engine.statistics().ready < 2:
                await trio.sleep(0.1)
            raise Killed
    before = await stored(runs)
    assert sorted(state.value for state, _ in before.values()) == ["acked", "delivered", "ready", "ready"]

    report = await rescored(runs, half)

    assert (report.scored, report.ready, report.unfinished) == (4, 0, 0)
    assert await stored(runs) == {name: (state, [0.5, 0.5]) for name, (state, _) in before.items()}
    async with runs.open(reward=half) as w:
        again = await w.engine.next_batch(1)
        assert again.redelivered
        assert {group.id for group in again.groups} == {group.id for group in second.groups}
        rest = await take_all(w.engine)
        assert w.servers.calls == 0
    assert {group.prompt.id for group in (*again.groups, *rest)} == {f"p{n}" for n in range(4)} - {
        first.groups[0].prompt.id
    }
    assert {row.reward for group in rest for row in group.trajectories} == {0.5}


async def waiting_with_one_sample():
    runs = Runs(count=1)
    with pytest.raises(Killed):
        async with runs.open(plan=lambda n, _: Say(seconds=1) if n == 0 else HANG, reward=failing_for()):
            await trio.sleep(2)
            raise Killed
    (only,) = (await stored(runs)).values()
    assert (only[0], len(only[1])) == (WAITING, 1)
    return runs


async def test_a_finished_sample_of_a_waiting_group_gets_its_new_reward_and_the_group_waits_on():
    runs = await waiting_with_one_sample()

    report = await rescored(runs, half)

    assert (report.scored, report.unfinished) == (1, 1)
    assert (await stored(runs))["p0"] == (WAITING, [0.5])
    async with runs.open(reward=half) as w:
        (group,) = await take_all(w.engine)
        assert w.servers.calls == 1
    assert [row.reward for row in group.trajectories] == [0.5, 0.5]


async def test_a_waiting_group_whose_sample_can_not_be_scored_is_quarantined_as_in_a_run():
    runs = await waiting_with_one_sample()

    report = await rescored(runs, broken)

    assert [(one.before, one.after, one.error.type) for one in report.failed] == [(WAITING, QUARANTINED, "KeyError")]
    assert (await stored(runs))["p0"] == (QUARANTINED, [None])
    async with runs.open(retry_quarantined=True, reward=half) as w:
        (group,) = await take_all(w.engine)
        assert w.servers.calls == 1  # sample 0 was scored again, and only sample 1 was sampled
    assert [row.reward for row in group.trajectories] == [0.5, 0.5]


async def test_a_finished_group_is_rewritten_whole_or_not_at_all_and_the_pass_goes_on_with_what_failed():
    runs = await lived(reward=failing_for())
    called, mended = [], False

    async def now(trajectory):
        called.append(trajectory.prompt.id)
        if trajectory.prompt.id == "p1" and trajectory.index == 1 and not mended:
            raise KeyError("no such key")
        return 0.5

    report = await rescored(runs, now, name="now")

    assert [(str(one.id), one.before, one.after) for one in report.failed] == [("0/p1", State.ACKED, State.ACKED)]
    found = await stored(runs)
    assert (found["p0"][1], found["p1"][1], found["p2"][1]) == ([0.5, 0.5], [0.0, 1.0], [0.5, 0.5])

    called.clear()
    mended = True
    report = await rescored(runs, now, name="now")

    assert called == ["p1", "p1"]
    assert (report.went_on, report.scored, report.failed) == (True, 1, ())
    assert report.skipped["scored before the interruption"] == 2
    assert {tuple(rewards) for _, rewards in (await stored(runs)).values()} == {(0.5, 0.5)}
    called.clear()
    assert not (await rescored(runs, now, name="now")).went_on
    assert len(called) == 6


async def test_while_a_pass_is_not_through_a_ledger_that_names_its_reward_takes_no_run():
    runs = Runs(count=2)
    named = {"ledger_settings": {"reward": "old"}}
    async with runs.open(keep_acked=True, reward=failing_for(), **named) as w:
        await take_all(w.engine)

    await rescored(runs, failing_for("p0"), name="new")

    for name in ("old", "new"):
        with pytest.raises(LedgerError, match=r"is being scored again with 'new'.*rescore sim --reward new"):
            async with runs.open(ledger_settings={"reward": name}):
                pass
    with pytest.raises(LedgerError, match="has rewards of 'old': with those of 'new' for the groups that are acked"):
        await rescored(runs, half, name="new", states=[State.ACKED])
    await rescored(runs, half, name="new")
    async with runs.open(ledger_settings={"reward": "new"}):
        pass
    with pytest.raises(LedgerError, match="its reward is 'new', this run's is 'old'"):
        async with runs.open(ledger_settings={"reward": "old"}):
            pass


async def test_a_part_of_the_states_may_be_scored_again_with_the_reward_that_the_ledger_names():
    runs = Runs(count=3)
    named = {"ledger_settings": {"reward": "mine"}}
    async with runs.open(keep_acked=True, reward=failing_for("p1"), **named) as w:
        await take_all(w.engine)

    report = await rescored(runs, half, name="mine", states=[QUARANTINED])

    assert (report.scored, report.ready) == (1, 1)
    assert (await stored(runs))["p1"] == (READY, [0.5, 0.5])
    async with runs.open(**named) as w:
        assert [group.prompt.id for group in await take_all(w.engine)] == ["p1"]


async def test_a_group_reward_and_a_filter_judge_as_in_a_run():
    runs = await lived(reward=broken, plan=in_a_second)

    async def ranks(group):
        return [float(row.index) for row in group.trajectories]

    async def not_the_first(group):
        return Drop("it is the first") if group.prompt.id == "p0" else Keep()

    report = await rescored(runs, half, group_reward=ranks, group_filter=not_the_first)

    assert (report.scored, report.ready, report.filtered) == (3, 2, 1)
    assert await stored(runs) == {"p1": (READY, [0.0, 1.0]), "p2": (READY, [0.0, 1.0])}
    async with runs.open() as w:
        assert len(await take_all(w.engine)) == 2
        assert (w.engine.statistics().filtered, w.engine.statistics().quarantined) == (1, 0)


async def test_a_group_whose_group_reward_fails_stays_quarantined_with_its_new_error():
    runs = await lived(count=1, reward=broken, plan=in_a_second)

    async def fails(group):
        raise ZeroDivisionError("no spread")

    report = await rescored(runs, half, group_reward=fails)

    assert [one.error.type for one in report.failed] == ["ZeroDivisionError"]
    assert (await stored(runs))["p0"] == (QUARANTINED, [0.5, 0.5])
    async with runs.open() as w:
        assert [one.error.type for one in w.engine.quarantined()] == ["ZeroDivisionError"]


async def test_a_scorer_is_tried_bounded_and_whatever_it_raises_is_its_groups_failure():
    """F101: ``exit()`` in a scorer ends nothing else."""
    runs = await lived(reward=failing_for())
    calls = []

    async def odd(trajectory):
        calls.append(trajectory.prompt.id)
        match trajectory.prompt.id:
            case "p0":
                raise SystemExit(3)
            case "p1":
                await trio.sleep_forever()
        return "no number"

    report = await rescored(runs, odd, settings=settings(deadlines={"reward": 5.0}, retry=Retry(max_attempts=2)))

    assert {str(one.id): one.error.type for one in report.failed} == {
        "0/p0": "SystemExit",
        "0/p1": "RewardError",
        "0/p2": "RewardError",
    }
    assert len(calls) == 3 * 2 * 2


async def test_what_a_scorer_does_to_its_prompt_is_not_stored():
    runs = await lived(count=1, reward=failing_for())

    async def meddles(trajectory):
        trajectory.prompt.metadata["note"] = "mine"
        return 0.5

    await rescored(runs, meddles)

    async with ledger_of(runs) as ledger:
        (only,) = await ledger.stored_after(-1, 1_000_000, RESCORED_STATES, 9)
    assert "note" not in only.prompt.metadata
    assert only.group.trajectories[0].prompt.metadata == only.prompt.metadata


async def test_at_most_max_running_rollouts_are_scored_at_once():
    runs = await lived(count=8, reward=failing_for())
    now, most = 0, 0

    async def slow(trajectory):
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await trio.sleep(1)
        now -= 1
        return 1.0

    await rescored(runs, slow, settings=settings(max_running=3))
    assert most == 3 - 3 % 2  # whole groups of two


async def test_without_a_reward_or_with_another_state_it_is_refused():
    runs = await lived(count=1, reward=failing_for())
    with pytest.raises(ValueError, match="needs a reward or a group_reward"):
        await rescored(runs)
    with pytest.raises(ValueError, match="states out of waiting"):
        await rescored(runs, half, states=[State.FILTERED])
    with pytest.raises(LedgerError, match="no run has begun"):
        await rescored(Runs(), half)


async def test_a_disk_that_fills_up_ends_the_pass_with_the_ledgers_error():
    runs = await lived(count=4, reward=failing_for())
    async with ledger_of(runs) as ledger:
        runs.disk.fault = disk_full_from(1)
        with pytest.raises(LedgerError, match="disk is full"):
            await rescore(ledger, half, settings=settings())


@attrs.define(eq=False)
class Passes:
    """What two passes over one ledger did: the second one goes on where the first was cancelled."""

    runs: Runs
    asked: list = attrs.field(factory=list)
    written: list = attrs.field(factory=list)
    found: dict = attrs.field(factory=dict)
    went_on: bool = False

    def check(self):
        assert {tuple(rewards) for _, rewards in self.found.values()} == {(2.0, 2.0)}, self.found
        assert {state for state, _ in self.found.values()} <= {State.ACKED, READY}
        for name in self.written:  # what was told is written, and is not scored again
            assert name not in self.asked, (name, self.asked)


def test_a_pass_cancelled_at_any_step_is_taken_up_by_the_next():
    async def scenario(arm):
        runs = await lived(count=4, reward=failing_for("p2"))
        life = arm.keep(Passes(runs))

        async def new(trajectory):
            life.asked.append(trajectory.prompt.id)
            await trio.sleep(random.Random(trajectory.prompt.id).random())
            return 2.0

        def tell(group):
            life.written.append(group.id.prompt)

        with trio.CancelScope() as scope:
            arm(scope)
            await rescored(runs, new, name="new", tell=tell)
        life.asked.clear()
        await rescored(runs, new, name="new") if scope.cancelled_caught else None
        life.found = await stored(runs)
        return life

    sweep = cancel_everywhere(scenario, lambda life, point: life.check(), sample=120)
    assert not sweep.failures, sweep
    assert sweep.points > 50


async def test_quarantined_groups_are_tried_again_in_the_order_of_their_pulls_with_new_tries():
    """Behind what waits. The finished samples stay; what failed for good once more is quarantined once more."""

    def plan(_, prompt):
        return Fail(ValueError("poison"), 1.0) if prompt[2] < 5 else Say(seconds=1)

    runs = Runs(count=3)
    async with runs.open(plan=plan, max_running=2) as w:
        assert [group.prompt.id for group in await take_all(w.engine)] == ["p2"]
        assert {report.id.prompt for report in w.engine.quarantined()} == {"p0", "p1"}
    async with runs.open(plan=plan) as w:
        await take_all(w.engine)
        assert w.servers.calls == 0
    async with runs.open(plan=plan, retry_quarantined=True, max_running=2) as w:
        assert await take_all(w.engine) == []
        assert w.engine.statistics().retries[Cause.ERROR] >= 2 * (QUICK.max_attempts - 1)
        assert {report.id.prompt for report in w.engine.quarantined()} == {"p0", "p1"}
    async with runs.open(retry_quarantined=True, max_running=2) as w:
        assert [group.prompt.id for group in await take_all(w.engine)] == ["p0", "p1"]
        assert w.engine.quarantined() == ()


async def test_a_group_whose_prompt_could_not_be_stored_is_not_tried_again():
    """The ledger has a stand-in for its prompt."""
    source = [Prompt(id="odd", input_ids=[1, 2, 3], metadata={"no": object()}), *prompts(1)]
    runs = Runs()
    async with runs.open(source=IterableSource(source)) as w:
        assert [group.prompt.id for group in await take_all(w.engine)] == ["p0"]
    async with runs.open(source=IterableSource(source), retry_quarantined=True) as w:
        assert await take_all(w.engine) == []
        assert [str(report.id) for report in w.engine.quarantined()] == ["0/odd"]
        assert w.servers.calls == 0


async def test_a_sample_that_is_cut_while_it_is_scored_is_scored_again_and_not_sampled_again():
    """By a sibling that failed for good, by the group's deadline, and by its own."""
    scored = []

    async def slow(trajectory):
        scored.append(trajectory.index)
        if trajectory.index == 0:
            await trio.sleep(1)
            raise KeyError("no such key")
        await trio.sleep(60)
        return 0.5

    runs = await lived(count=1, plan=in_a_second, reward=slow)
    assert await stored(runs) == {"p0": (QUARANTINED, [None, None])}

    for limit in ({"group": 10.0}, {"rollout": 10.0}):
        calls = []

        async def first_too_slow(trajectory, calls=calls):
            calls.append(trajectory.index)
            if len(calls) <= 2:
                await trio.sleep(60)
            return 0.5

        async with world(1, plan=in_a_second, reward=first_too_slow, deadlines=limit) as w:
            (group,) = await take_all(w.engine)
            assert w.servers.calls == 2
            assert w.engine.statistics().tokens.wasted_total == 0
        assert [row.reward for row in group.trajectories] == [0.5, 0.5]


def test_a_scorer_that_raises_at_any_await_costs_its_own_group_only():
    """Each group is written whole with its new rewards, or keeps the old ones and is listed."""

    async def scenario(faults):
        runs = await lived(count=3, reward=failing_for())

        async def new(trajectory):
            await trio.sleep(0.5)
            await trio.sleep(trajectory.index)
            return 2.0

        life = Passes(runs)
        report = await rescored(runs, faults(new), settings=settings(retry=Retry(max_attempts=1)))
        life.found, life.written = await stored(runs), [one.id.prompt for one in report.failed]
        life.went_on = report.scored + len(report.failed) == 3
        return life

    def check(life, point):
        rewards = {name: rewards for name, (_, rewards) in life.found.items()}
        expected = {name: [0.0, 1.0] if name in life.written else [2.0, 2.0] for name in rewards}
        assert rewards == expected
        assert life.went_on
        assert len(life.written) <= 1

    sweep = throw_everywhere(scenario, check, exc=SystemExit)
    assert not sweep.failures, sweep


async def test_a_sample_that_only_lacks_a_reward_is_as_old_as_its_tokens():
    """So pacing knows in time that its group must be in the next batch."""
    calls = []

    async def slow(trajectory):
        calls.append(trajectory.index)
        await trio.sleep(60 if len(calls) <= 2 else 1)
        return 0.5

    async with world(1, plan=in_a_second, reward=slow, deadlines={"group": 10.0}) as w:
        await trio.sleep(5)
        await w.engine.note_weight_version(3)
        while not w.engine.statistics().requeues[Cause.DEADLINE] or not w.engine.statistics().running:
            await trio.sleep(0.1)
        (attempt,) = w.engine._state.running
        while len(attempt.tries) < 2 or not all(this.sampled for this in attempt.tries.values()):
            await trio.sleep(0.1)
        assert attempt.begun == 0
        assert len(await take_all(w.engine)) == 1
        assert w.servers.calls == 2
