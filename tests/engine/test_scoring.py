"""Rewards, group rewards and filters: user code that fails alone, and infrastructure that is never scored as 0."""

import math

import pytest
import trio

from trio_rollout import Cause, Drop, Keep
from trio_rollout.testing import Fail, FakeServers, Say

from .conftest import take_all, world


def failing(times, error=None):
    """A scorer that fails the first ``times`` calls."""
    calls = []

    async def reward(trajectory):
        calls.append(trajectory)
        if len(calls) <= times:
            raise error or RuntimeError("judge is away")
        return 0.5

    return reward, calls


async def test_only_the_scorer_runs_again():
    """F025: the scorer fails twice, then succeeds: n generations in total, three scorer calls for that sample."""
    reward, calls = failing(2)
    async with world(1, reward=reward) as w:
        (group,) = await take_all(w.engine)
    assert group.attempt == 1
    assert w.servers.calls == 2
    assert len(calls) == 4
    assert [row.reward for row in group.trajectories] == [0.5, 0.5]


async def test_a_scorer_that_keeps_failing_uses_up_attempts_and_then_the_group_is_quarantined():
    reward, _ = failing(10_000)
    async with world(1, reward=reward) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert (report.cause, report.attempts) == (Cause.ERROR, 3)
    assert "judge is away" in report.error.message


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, "0.5", [1.0], {"a": None}])
async def test_what_is_no_reward_is_refused_with_its_value(bad):
    async def reward(trajectory):
        return bad

    async with world(1, reward=reward) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert report.error.type == "RewardError"
    assert type(bad if not isinstance(bad, dict) else None).__name__ in report.error.message


async def test_a_reward_that_is_not_async_is_refused_with_what_makes_it_so():
    def reward(trajectory):
        return 1.0

    async with world(1, reward=reward) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert report.error.type == "RewardError"
    assert "in_thread" in report.error.message


async def test_several_rewards_by_name_are_kept():
    async def reward(trajectory):
        return {"right": 1, "short": 0.25}

    async with world(1, reward=reward) as w:
        (group,) = await take_all(w.engine)
    assert group.trajectories[0].reward == {"right": 1.0, "short": 0.25}


async def test_a_judge_that_hangs_is_cut_at_the_rewards_deadline():
    """F043: one hanging judge costs its group an attempt, never the run."""
    calls, began = [], trio.current_time()

    async def reward(trajectory):
        calls.append(trajectory)
        if len(calls) <= 3:
            await trio.sleep_forever()
        return 1.0

    async with world(3, reward=reward, deadlines={"reward": 2.0}) as w:
        assert len(await take_all(w.engine)) == 3
        assert trio.current_time() - began < 10  # cut by the reward's own deadline, not by the group's of half an hour


async def test_a_scorer_that_fails_is_heard_of_at_each_try(caplog):
    """Not only the last try is logged: with many tries left the run would seem to hang."""

    async def reward(trajectory):
        raise AttributeError("no attribute 'lenght'")

    async with world(1, reward=reward) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    tries = [record for record in caplog.records if ": try " in record.message]
    assert len(tries) >= 2
    assert "lenght" in tries[0].message
    assert any(f"{report.id} is quarantined" in record.message for record in caplog.records)


async def test_a_group_reward_scores_all_samples_at_once():
    async def group_reward(group):
        return [index / 10 for index, _ in enumerate(group.trajectories)]

    async with world(2, reward=None, group_reward=group_reward) as w:
        groups = await take_all(w.engine)
    assert [[row.reward for row in group.trajectories] for group in groups] == [[0.0, 0.1]] * 2


async def test_a_group_reward_of_the_wrong_length_is_refused():
    async def group_reward(group):
        return [1.0]

    async with world(1, reward=None, group_reward=group_reward) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert "2 rewards wanted" in report.error.message


async def test_a_filter_drops_with_a_reason_and_a_replacement_runs_at_once():
    """F014: dropped groups are counted and replaced; no consumer waits for ever."""

    async def group_filter(group):
        return Drop("too easy") if int(group.prompt.label) % 3 == 0 else Keep()

    async with world(9, group_filter=group_filter) as w:
        groups = await take_all(w.engine)
        counts = w.engine.statistics()
    assert len(groups) == 6
    assert counts.filtered == 3


async def test_a_filter_that_returns_something_else_is_an_error():
    async def group_filter(group):
        return True

    async with world(1, group_filter=group_filter) as w:
        assert await take_all(w.engine) == []
        assert "Keep() or Drop(reason)" in w.engine.quarantined()[0].error.message


async def test_without_a_reward_the_trajectories_have_none():
    async with world(1, reward=None) as w:
        (group,) = await take_all(w.engine)
    assert group.trajectories[0].reward is None


async def test_a_failed_server_is_never_scored():
    """F070: a trajectory without tokens never reaches the scorer."""
    seen = []

    async def reward(trajectory):
        seen.append(trajectory)
        return 0.0

    servers = FakeServers(plan=lambda n, _: Fail(RuntimeError("500")) if n % 3 == 0 else Say())
    async with world(4, reward=reward, servers=servers) as w:
        await take_all(w.engine)
    assert all(row.segments[0].response_length for row in seen)
