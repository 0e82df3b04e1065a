"""SimWorld: the whole engine over a simulated network, disk and clock, in one seeded run."""

import os
import subprocess
import sys

import pytest
import trio

from trio_rollout import SamplingParams, Turn
from trio_rollout.testing import Arm, InvariantBroken, Point, SimWorld, cancel_everywhere, explore, is_conserved
from trio_rollout.tiny import TinySettings, open_tiny

from . import small_world
from .crashing_world import check, crashing
from .small_world import digest, faulty, small
from .troubled_world import troubled


def test_the_whole_system_in_one_run():
    world = SimWorld(seed=1)
    result = world.run(small)
    assert result.value.acked == small_world.COUNT
    assert is_conserved(result.value)
    assert world.invariants.checked > 500
    assert world.seen["partial send"] > 0


def test_many_seeds_with_faults_lose_nothing_and_meet_the_interesting_states():
    explore(faulty, range(30)).require("reset", "refused", "silent", "unanswered", "tried again", "partial send")


def test_hosts_may_die_lose_power_and_be_cut_off():
    interesting = ("killed", "power off", "partition", "tried again: server_lost", "tried again: weight_update")
    explore(troubled, range(10), limit=6 * 3600).require(*interesting)


def test_what_was_acked_survives_every_power_cut_and_what_was_not_is_not_lost():
    """P7 and P11 with the engine, its ledger, and a disk that tears and reorders unsynced writes."""
    interesting = (
        "power cut",
        "cut with something acked",
        "cut with something delivered and not acked",
        "cut with finished siblings on disk",
        "cut with turns on disk",
    )
    explore(crashing, range(12), check=check).require(*interesting)


def test_the_same_seed_gives_the_same_digest_in_another_process_with_other_hashes():
    """P10, for the whole system."""
    first = digest(1)
    assert digest(1) == first
    assert digest(2) != first
    answer = subprocess.run(
        [sys.executable, small_world.__file__],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == first


def test_the_whole_system_cancelled_at_any_step_closes_every_connection_and_frees_every_slot():
    """A sample of the points; conservation holds between any two steps of each."""

    async def scenario(arm: Arm[SimWorld]) -> SimWorld:
        world = arm.keep(SimWorld(seed=3, invariants=arm.invariants))

        async def cancelled(world: SimWorld) -> None:
            with trio.CancelScope() as scope:
                arm(scope)
                await faulty(world)
            assert world.net.connections == 0

        await world.inside(cancelled)
        return world

    def check(world: SimWorld, point: Point | None) -> None:
        assert point is not None or world.invariants.checked > 500

    cancel_everywhere(scenario, check, sample=25).require()


def test_a_broken_invariant_stops_the_run_and_names_the_step():
    done: list[int] = []

    async def scenario(world: SimWorld) -> None:
        with world.invariants.hold(lambda: len(done) < 3, "at most three"):
            for number in range(10):
                await trio.sleep(1)
                done.append(number)

    with pytest.raises(InvariantBroken, match="at most three") as caught:
        SimWorld(seed=0).run(scenario)
    assert len(done) == 3
    assert "scenario" in str(caught.value)


def test_explore_reports_each_seed_that_fails():
    async def fails_sometimes(world: SimWorld) -> float:
        world.sometimes("low", world.rng.random() < 0.5)
        return world.rng.random()

    def check(value: float) -> None:
        assert value < 0.5

    found = explore(fails_sometimes, range(20), check=check)
    assert 0 < len(found.failures) < 20
    assert 0 < found.sometimes["low"] < 20
    seed = found.failures[0].point.step
    assert SimWorld(seed=seed).run(fails_sometimes).value >= 0.5
    assert f"SimWorld(seed={seed})" in str(found)


def test_a_world_runs_once():
    async def nothing(world: SimWorld) -> None:
        await trio.lowlevel.checkpoint()

    world = SimWorld(seed=0)
    with pytest.raises(RuntimeError, match="does not run"):
        world.net  # noqa: B018  a property that raises
    world.run(nothing)
    with pytest.raises(RuntimeError, match="runs once"):
        world.run(nothing)


def test_blocking_calls_take_virtual_time():
    async def scenario(world: SimWorld) -> float:
        assert await world.run_sync(max, 1, 2) == 2
        return trio.current_time()

    assert 0 < SimWorld(seed=0, blocking_s=10).run(scenario).value <= 10


def test_the_tiny_server_answers_in_a_world_too():
    """A real model behind the simulated network; the same seed, the same tokens and log-probs."""

    async def scenario(world: SimWorld) -> Turn:
        async with open_tiny(TinySettings(seed=1), ports=world.ports) as tiny:
            world.net.add_host("http://tiny:1", tiny.serve)
            async with world.open_servers(["http://tiny:1"]) as servers:
                turn = await servers.generate([1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True))
            assert world.net.connections == 0
        return turn

    first, again = (SimWorld(seed=4).run(scenario) for _ in range(2))
    assert len(first.value.output_ids) == 5
    assert first.value == again.value
    assert first.digest == again.digest
