"""Failures that were reported from the field, each as the kind it is; see tests/README.md for the whole list."""

import pytest
import trio

from trio_rollout import Cause, EngineSettings, PauseMode, Retry, Status, Stop
from trio_rollout.errors import ContextFull, RequestRejected, RolloutError, SettingsError
from trio_rollout.testing import HANG, Fail, FakeServers, Say

from .conftest import take_all, world

ONCE = Retry(max_attempts=1)


async def test_f007_a_rollout_that_ends_without_a_result_is_a_failure_and_the_batch_completes():
    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input)
        return None if prompt.id == "p3" and rollout.attempt == 1 else rollout.finish([turn])

    async with world(8, generate=generate, max_ready=8) as w:
        assert len((await w.engine.next_batch(8)).groups) == 8


async def test_f008_to_fail_fast_is_a_setting_and_the_consumer_hears_of_it_at_once():
    plan = lambda n, _: Fail(ValueError("boom"), 0.5) if n == 0 else HANG
    async with world(4, plan=plan, retry=ONCE, failure_budget=1) as w:
        began = trio.current_time()
        with pytest.raises(RolloutError, match="boom"):
            await w.engine.next_batch(4)
        assert trio.current_time() - began < 1


async def test_f010_a_dropped_prompt_is_replaced_at_once():
    plan = lambda _, prompt: Fail(RequestRejected("no", status=400)) if prompt[2] == 4 else Say()
    async with world(5, plan=plan) as w:
        batch = await w.engine.next_batch(4)
    assert sorted(group.prompt.id for group in batch.groups) == ["p0", "p2", "p3", "p4"]


async def test_f012_a_group_with_a_rejected_member_is_never_delivered():
    async with world(1, plan=lambda n, _: Fail(RequestRejected("no", status=400), 0.1) if n == 1 else Say()) as w:
        assert await take_all(w.engine) == []
        counts = w.engine.statistics()
    assert (counts.quarantined, counts.pulled) == (1, 1)


async def test_f013_a_window_cancels_what_ran_and_nothing_that_starts_later():
    async with world(12, plan=lambda *_: Say(seconds=5), max_running=8) as w:
        await trio.sleep(1)
        running = w.engine.statistics().running_rollouts
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
        assert len(await take_all(w.engine)) == 12
        assert w.engine.statistics().retries[Cause.WEIGHT_UPDATE] == running == 8


async def test_f016_an_update_right_after_a_batch_sends_nothing_twice():
    async with world(4, plan=lambda *_: Say(seconds=1)) as w:
        await trio.sleep(10)
        await w.engine.next_batch(2)
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
        await take_all(w.engine)
        assert w.servers.calls == 4 * 2


@pytest.mark.parametrize("running", [0, 7])
def test_f019_settings_under_which_nothing_could_run_are_refused(running):
    with pytest.raises(SettingsError, match=r"max_running.*got {}".format(running)):  # noqa: UP032  braces of a regex
        EngineSettings(samples_per_prompt=8, max_running=running)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_f020_a_version_update_does_not_wait_for_long_rollouts(mode):
    async with world(4, plan=lambda *_: Say(seconds=100)) as w:
        await trio.sleep(1)
        began = trio.current_time()
        async with w.engine.weight_update(version=1, mode=mode):
            w.servers.set_version(1)
        assert trio.current_time() - began < 0.1


async def test_f021_free_slots_get_work_as_soon_as_the_gate_opens():
    async with world(8, plan=lambda n, _: Say(seconds=1 if n < 2 else 100), max_running=8) as w:
        async with w.engine.weight_update(version=1, mode=PauseMode.IN_PLACE):
            w.servers.set_version(1)
        await trio.sleep(1.2)
        assert w.engine.statistics().running_rollouts == 8
        assert w.servers.running == 8


async def test_f028_a_retry_holds_tokens_of_its_own_attempt_only():
    async def generate(prompt, rollout):
        first = await rollout.generate(rollout.input)
        if rollout.attempt == 1:
            raise OSError("turn 2 answered 500")
        second = await rollout.generate([*first.prompt_ids, *first.output_ids])
        return rollout.finish([first, second])

    async with world(1, generate=generate) as w:
        (group,) = await take_all(w.engine)
    for row in group.trajectories:
        assert row.turns == 2
        assert row.segments[0].response_length == 8


async def test_f051_a_consumer_that_gives_up_every_moment_still_sees_each_group_once():
    seen = []
    async with world(200, plan=lambda *_: Say(seconds=0.01), max_running=16) as w:
        while len(seen) < 200:
            with trio.move_on_after(0.01):
                batch = await w.engine.next_batch(1)
                seen.extend(group.prompt.id for group in batch.groups)
    assert len(set(seen)) == 200


async def test_f053_a_failure_in_the_same_tick_as_an_update_is_recorded_once():
    async with world(3, plan=lambda n, _: Fail(OSError("reset"), 4.0) if n < 2 else Say(seconds=6)) as w:
        await trio.sleep(4)
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
        assert len(await take_all(w.engine)) == 3
        retries = w.engine.statistics().retries
        assert retries[Cause.ERROR] + retries[Cause.WEIGHT_UPDATE] == 4


async def test_f055_what_finishes_during_a_drain_is_scored_before_the_engine_is_left():
    async def slow(trajectory):
        await trio.sleep(3)
        return 1.0

    async with world(2, plan=lambda *_: Say(seconds=2), reward=slow) as w:
        await trio.sleep(1)
        await w.engine.drain(grace=10)
        groups = await take_all(w.engine)
    assert [row.reward for group in groups for row in group.trajectories] == [1.0] * 4


async def test_f067_after_a_drain_nothing_is_sent():
    servers = FakeServers(plan=lambda *_: Say(seconds=2))
    async with world(20, servers=servers) as w:
        await trio.sleep(1)
        await w.engine.drain(grace=0)
        sent = servers.calls
        await trio.sleep(100)
        assert servers.calls == sent


async def test_f077_with_a_full_buffer_the_control_plane_answers_at_once():
    async with world(20, max_ready=2, max_running=12) as w:
        await trio.sleep(20)
        began = trio.current_time()
        async with w.engine.weight_update(version=1, mode=PauseMode.RETRACT):
            w.servers.set_version(1)
        await w.engine.drain(grace=5)
        assert trio.current_time() - began < 0.1


async def test_f081_a_source_that_waits_does_not_hold_the_drain():
    """The engine cannot leave a task behind, so every await of a source must be cancellable."""

    class Slow:
        async def take(self, count):
            await trio.sleep(60)

        async def give_back(self, prompts):
            raise AssertionError("nothing was taken")

        def state(self):
            return {}

    async with world(source=Slow()) as w:
        await trio.sleep(1)
        began = trio.current_time()
        await w.engine.drain()
        assert trio.current_time() - began < 1


async def test_f033_a_context_that_earlier_turns_have_filled_truncates_the_sample():
    """The policy has filled its context: a trainable sample, no failure. The last prompt, which no server took, is not in it."""

    async def generate(prompt, rollout):
        turns = [await rollout.generate(rollout.input)]
        while turns[-1].stop is Stop.STOP:
            turns.append(await rollout.generate([*turns[-1].prompt_ids, *turns[-1].output_ids, *[7] * 50]))
        return rollout.finish(turns)

    plan = lambda _, prompt: Fail(ContextFull("no room")) if len(prompt) > 50 else Say(tokens=4)
    async with world(1, generate=generate, plan=plan) as w:
        (group,) = await take_all(w.engine, 1)
    for row in group.trajectories:
        assert (row.status, row.stop, row.turns) == (Status.TRUNCATED, Stop.LENGTH, 2)
        (segment,) = row.segments
        assert (segment.response_length, len(segment.tokens)) == (4, 7)


async def test_f033_a_prompt_that_fills_the_context_alone_is_bad_input():
    async with world(1, plan=lambda *_: Fail(ContextFull("no room"))) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert report.attempts == 1
    assert "no room" in report.error.message
