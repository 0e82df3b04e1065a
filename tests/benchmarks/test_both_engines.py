"""Both engines of the benchmarks do the same job, so that their figures can be compared."""

from collections import Counter

import attrs
import pytest
from harness.arms import AIOHTTP, CONTROL, HTTPX, OURS, world_of
from harness.fake import Latency
from harness.jobs import JOBS, Hooks
from harness.spec import Spec

QUICK = Latency(median=3, sigma=0.7, cap=50)
pytestmark = pytest.mark.parametrize("arm", [OURS, AIOHTTP, CONTROL, HTTPX])


@pytest.fixture
def spec(server):
    return Spec(url=server.url, slots=16, per_group=4, tokens=4, groups=24, limit=60, group_s=60, backoff_s=0.01)


def do(arm, job, spec):
    world = world_of(arm)
    return world.run(JOBS[job], world, spec)


def test_every_group_comes_once_and_whole(arm, server, spec):
    """Each prompt once, n rewarded rollouts each, all slots in use and never more; nothing is left on the server."""
    server.configure(QUICK)
    found = do(arm, "finite", spec)
    assert (found["groups"], found["lost"], found["duplicates"], found["wrong"]) == (24, 0, 0, 0)
    assert found["ended"]
    assert Counter(name for _, name in found["came"]) == Counter(map(str, range(24)))
    assert found["server_generates"] == 24 * 4
    assert found["server_most"] <= 16
    assert (server.stats()["running"], server.stats()["aborts"]) == (0, 0)


def test_batches_have_the_size_asked_for_and_the_last_one_what_is_left(arm, server, spec):
    server.configure(QUICK)

    async def main():
        async with world.engine(attrs.evolve(spec, groups=8), Hooks(spec, lambda _sent, _took: None)) as engine:
            batches = [await engine.take(3) for _ in range(4)]
            return [[done.rewards for done in batch] for batch in batches]

    world = world_of(arm)
    batches = world.run(main)
    assert [len(batch) for batch in batches] == [3, 3, 2, 0]
    assert batches[0][0] == [4.0] * 4


def test_what_the_server_refuses_or_resets_is_tried_again(arm, server, spec):
    """A 500 and a reset connection cost an attempt, not a group."""
    server.configure(QUICK, fail_mod=7, fail_rem=3, reset_mod=5, reset_rem=1)
    found = do(arm, "finite", spec)
    assert (found["groups"], found["lost"], found["given_up"], found["duplicates"]) == (24, 0, 0, 0)
    assert found["server_failed"] == 3
    assert found["server_resets"] == 5


def test_a_hang_ends_with_the_groups_deadline_and_is_aborted(arm, server, spec):
    server.configure(QUICK, hang_below=2, hang_times=4, disconnect=60_000)
    found = do(arm, "finite", attrs.evolve(spec, group_s=3.0))  # long enough for the others on a busy machine, too
    assert (found["groups"], found["lost"], found["given_up"]) == (24, 0, 0)
    assert server.stats()["running"] == 0
    assert server.stats()["aborted"] == 8


def test_a_reward_that_always_raises_ends_its_attempt_and_then_its_group(arm, server, spec):
    """Groups 3, 10 and 17: with a single attempt they are given up, and the rest comes."""
    server.configure(QUICK)
    found = do(arm, "finite", attrs.evolve(spec, reward_fails_mod=7, attempts=1))
    assert (found["groups"], found["given_up"], found["lost"]) == (21, 3, 0)


def test_a_lost_sandbox_is_tried_again(arm, server, spec):
    """Of rollouts of three turns, each of which loses its sandbox with a chance of 20 %."""
    server.configure(QUICK)
    found = do(arm, "finite", attrs.evolve(spec, turns=3, loses=0.2, attempts=50, backoff_s=0.001))
    assert (found["groups"], found["lost"], found["given_up"], found["wrong"]) == (24, 0, 0, 0)
    needed = 24 * 4 * 3
    assert needed < found["server_generates"] < (1.2 if arm == OURS else 10) * needed


def test_a_judge_that_is_down_costs_our_engine_no_token(arm, server, spec):
    server.configure(QUICK)
    found = do(arm, "finite", attrs.evolve(spec, judge_fails=5))
    assert (found["groups"], found["lost"], found["given_up"], found["wrong"]) == (24, 0, 0, 0)
    assert (found["server_generates"] == 24 * 4) == (arm == OURS)


def test_exit_in_a_scorer_ends_no_run_of_ours(arm, server, spec):
    if arm != OURS:
        pytest.skip("asyncio lets SystemExit out of a task end the loop")
    server.configure(QUICK)
    found = do(arm, "finite", attrs.evolve(spec, reward_exits=1))
    assert (found["groups"], found["lost"], found["server_generates"]) == (24, 0, 24 * 4)


def test_leaving_aborts_everything_that_is_in_flight(arm, server, spec):
    server.configure(Latency(median=600_000), disconnect=600_000)
    found = do(arm, "cancelled", attrs.evolve(spec, groups=None))
    assert found["server_running"] == 0
    assert server.stats()["aborted"] == 16


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_a_weight_update_stops_the_server_and_goes_on_afterwards(arm, server, spec, mode):
    """In mode abort nothing runs inside the window; afterwards every group comes all the same, once."""
    server.configure(Latency(median=700))
    world = world_of(arm)

    async def main():
        async with world.engine(attrs.evolve(spec, groups=6), Hooks(spec, lambda _sent, _took: None)) as engine:
            while server.stats()["running"] < 16:
                await world.sleep(0.01)
            async with engine.weight_update(1, mode):
                inside = server.stats()["running"]
                server.ask("POST", "/weights?version=1")
            names = []
            while batch := await engine.take(8):
                names += [done.id for done in batch]
            return inside, names

    inside, names = world.run(main)
    assert inside == (0 if mode == "abort" else 16)
    assert Counter(names) == Counter(map(str, range(6)))
