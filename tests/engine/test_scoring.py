"""Rewards, group rewards and filters: user code that fails alone, and infrastructure that is never scored as 0."""

import asyncio
import math
from collections import Counter

import attrs
import numpy as np
import pytest
import trio

from trio_rollout import Cause, Drop, Keep
from trio_rollout.errors import EndOfData, InfrastructureError, RewardError, RolloutError, ServerLost
from trio_rollout.testing import Fail, FakeServers, Say

from .conftest import QUICK, take_all, world

RETRY_OFTEN = attrs.evolve(QUICK, max_attempts=5)


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


async def test_a_scorer_that_keeps_failing_ends_its_group_and_samples_nothing_again():
    reward, _ = failing(10_000)
    async with world(1, reward=reward) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
        assert w.servers.calls == 2
    assert (report.cause, report.attempts) == (Cause.ERROR, 1)
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
    """A lambda, because it may hand on a coroutine; a function is refused when the engine is opened."""
    async with world(1, reward=lambda _: 1.0) as w:
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


async def test_a_scorer_that_fails_is_heard_of_at_its_first_try(caplog):
    """Not only at the last one: with many tries left it would look like a run that hangs."""

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


async def test_f105_a_scorer_that_fails_alike_is_asked_twice_and_no_more(caplog):
    """A programming error: each trajectory costs two calls, and the log shows the error in full only once."""
    calls = []

    async def reward(trajectory):
        calls.append((trajectory.prompt.id, trajectory.index, trajectory.text))
        raise AttributeError("no attribute 'lenght'")

    async with world(6, reward=reward, retry=RETRY_OFTEN, failure_budget=100) as w:
        assert await take_all(w.engine) == []
    tries = [record.getMessage() for record in caplog.records if ": try " in record.message]
    assert [text for text in tries if "Traceback" in text] == tries[:1]
    assert len(tries) <= math.log2(len(calls)) + 1
    assert tries[-1].endswith("so far)")
    assert max(Counter(calls).values()) == 2


async def test_f106_rewards_of_one_group_with_unequal_names_are_refused():
    async def reward(trajectory):
        return {"right": 1.0} if trajectory.index == 0 else {"right": 1.0, "short": 0.5}

    async with world(1, reward=reward) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert report.error.type == "RewardError"
    assert "sample 0 has the names ['right'] and sample 1 has the names ['right', 'short']" in report.error.message


async def test_f106_numpy_values_are_rewards():
    async def reward(trajectory):
        return np.bool_(1)

    async def group_reward(group):
        return np.array([0.25, 0.5])

    async with world(1, reward=reward) as w:
        (group,) = await take_all(w.engine)
    assert [row.reward for row in group.trajectories] == [1.0, 1.0]
    async with world(1, reward=None, group_reward=group_reward) as w:
        (group,) = await take_all(w.engine)
    assert [row.reward for row in group.trajectories] == [0.25, 0.5]


async def test_f104_asyncio_code_in_a_reward_is_told_of_the_adapter():
    async def reward(trajectory):
        await asyncio.sleep(0 if trajectory.index else 1)

    async with world(1, reward=reward) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert "trio_rollout_compat.asyncio_reward" in report.error.message


async def test_f104_asyncio_code_in_a_generate_function_is_told_of_the_adapter():
    async def generate(prompt, rollout):
        await asyncio.sleep(0)

    async with world(1, generate=generate) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert "asyncio_generate(fn, bridge=...)" in report.error.message


async def test_f104_a_loop_over_batches_that_gets_none_because_all_failed_is_an_error():
    """Three groups are fewer than the failure budget: without this the loop would just end."""
    reward, _ = failing(10_000)
    async with world(3, reward=reward) as w:
        with pytest.raises(
            RolloutError, match=r"no group was delivered: .* 3 quarantined\. Last error: .*judge is away"
        ):
            async for _ in w.engine.batches(2):
                pass
        with pytest.raises(EndOfData) as end:
            await w.engine.next_batch(1)
    assert (end.value.delivered, end.value.quarantined) == (0, 3)


async def test_f104_a_loop_that_got_a_batch_ends_as_ever():
    async def reward(trajectory):
        if trajectory.prompt.label == "0":
            raise RuntimeError("judge is away")
        return 1.0

    async with world(3, reward=reward) as w:
        groups = [group async for batch in w.engine.batches(2) for group in batch.groups]
        assert (len(groups), len(w.engine.quarantined())) == (2, 1)


async def test_f104_a_loop_of_which_the_filter_dropped_everything_ends_as_ever():
    async def group_filter(group):
        return Drop("too easy")

    async with world(3, group_filter=group_filter) as w:
        assert [batch async for batch in w.engine.batches(2)] == []


class JudgeIsDown(InfrastructureError):
    """Raised by a user's own client."""


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("judge"),
        JudgeIsDown("judge"),
        RewardError("in a process", raised=("builtins.ConnectionResetError", "builtins.ConnectionError")),
        ServerLost("judge"),
    ],
)
async def test_f102_a_judge_that_is_down_costs_no_try_and_no_token(error):
    reward, calls = failing(40, error)
    async with world(1, reward=reward) as w:
        (group,) = await take_all(w.engine)
    assert group.attempt == 1
    assert w.servers.calls == 2
    assert len(calls) == 42


async def test_f102_a_judge_that_stays_down_is_asked_up_to_max_free_times():
    reward, calls = failing(10_000, ConnectionResetError("judge"))
    async with world(1, reward=reward, retry=attrs.evolve(QUICK, max_free=5), samples_per_prompt=1) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert report.error.cause is Cause.INFRASTRUCTURE
    assert len(calls) == 6
    assert w.servers.calls == 1
