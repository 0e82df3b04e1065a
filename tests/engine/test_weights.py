"""The weight-update window: its effects on groups, on versions and on waiting calls."""

import pytest
import trio

from trio_rollout import Cause, PauseMode
from trio_rollout.errors import ServerError
from trio_rollout.sources import IterableSource
from trio_rollout.testing import FakeServers, Say, prompts

from .conftest import take_all, world


async def test_versions_follow_the_window():
    async with world(8, plan=lambda *_: Say(seconds=2)) as w:
        first = await w.engine.next_batch(2)
        async with w.engine.weight_update(version=3):
            w.servers.set_version(3)
        rest = await take_all(w.engine)

    assert {group.newest_version for group in first.groups} == {0}
    assert {group.oldest_version for group in rest} == {0, 3} or {group.oldest_version for group in rest} == {3}
    assert w.servers.required == 3
    assert w.engine.weight_version == 3


async def test_abort_restarts_what_is_sampling_without_using_up_an_attempt():
    """F054, F059: interrupted samples start again from the prompt, under the new version only."""
    async with world(2, plan=lambda *_: Say(tokens=8, seconds=10)) as w:
        await trio.sleep(4)
        async with w.engine.weight_update(version=1, mode=PauseMode.ABORT):
            w.servers.set_version(1)
        groups = await take_all(w.engine)
        counts = w.engine.statistics()

    assert counts.retries[Cause.WEIGHT_UPDATE] == 4
    assert all(group.attempt == 1 for group in groups)
    assert all((group.oldest_version, group.newest_version) == (1, 1) for group in groups)
    assert all(row.segments[0].response_length == 8 for group in groups for row in group.trajectories)


async def test_abort_spares_a_sample_that_is_only_being_scored():
    """It has all its tokens (decision 0002)."""

    asked = []

    async def judge(trajectory):
        asked.append(trajectory.index)
        await trio.sleep(20)
        return 1.0

    async with world(1, reward=judge) as w:
        await trio.sleep(10)
        async with w.engine.weight_update(version=1, mode=PauseMode.ABORT):
            w.servers.set_version(1)
        (group,) = await take_all(w.engine)
        assert (w.servers.calls, sorted(asked)) == (2, [0, 1])
    assert (group.oldest_version, group.newest_version) == (0, 0)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_other_modes_keep_requests_running_and_only_split_their_spans(mode):
    async with world(2, plan=lambda *_: Say(tokens=8, seconds=8)) as w:
        await trio.sleep(4)
        async with w.engine.weight_update(version=1, mode=mode):
            w.servers.set_version(1)
            await trio.sleep(100)
        groups = await take_all(w.engine)
        counts = w.engine.statistics()

    assert counts.retries[Cause.WEIGHT_UPDATE] == 0
    spans = [row.segments[0].versions for group in groups for row in group.trajectories]
    assert spans == [((0, 4, 0), (4, 8, 1))] * 4


async def test_the_clock_of_a_turn_stands_still_in_the_window_but_the_groups_does_not():
    """A turn of 8 s within its 10 s survives a window of 100 s."""
    async with world(2, plan=lambda *_: Say(seconds=8), deadlines={"turn": 10.0}) as w:
        await trio.sleep(4)
        async with w.engine.weight_update(version=1, mode=PauseMode.IN_PLACE):
            w.servers.set_version(1)
            await trio.sleep(100)
        await take_all(w.engine)
        assert w.engine.statistics().retries[Cause.DEADLINE] == 0


async def test_partial_goes_on_from_the_tokens_it_has():
    """With partial the attempt is kept: its tokens, their log-probs and their versions."""
    async with world(2, plan=lambda n, _: Say(tokens=8 if n < 4 else 4, seconds=8), partial=True) as w:
        await trio.sleep(4)
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
        groups = await take_all(w.engine)
        counts = w.engine.statistics()

    assert sum(counts.retries.values()) == 0
    for row in [row for group in groups for row in group.trajectories]:
        (segment,) = row.segments
        assert segment.response_length == 8
        assert segment.versions == ((0, 4, 0), (4, 8, 1))
        assert len(segment.log_probs) == 8


async def test_nothing_is_sent_while_the_window_is_open():
    async with world(10, plan=lambda *_: Say(seconds=2)) as w:
        await trio.sleep(1)
        async with w.engine.weight_update(version=1):
            sent = w.servers.calls
            await trio.sleep(50)
            assert w.servers.calls == sent
            w.servers.set_version(1)
        assert len(await take_all(w.engine)) == 10


async def test_a_turn_that_begins_in_the_window_waits_at_the_gate():
    """Not on a paused server, where its abort would be lost."""
    asked = []

    class Asked(FakeServers):
        async def generate(self, *args, **more):
            asked.append(self.paused)
            return await super().generate(*args, **more)

    async def generate(prompt, rollout):
        turns = []
        for _ in range(3):
            turns.append(await rollout.generate(rollout.input))
            await trio.sleep(3)
        return rollout.finish(turns)

    async with world(4, servers=Asked(plan=lambda *_: Say(seconds=1)), generate=generate) as w:
        await trio.sleep(2)
        async with w.engine.weight_update(version=1, mode=PauseMode.RETRACT):
            await trio.sleep(20)
            w.servers.set_version(1)
        assert len(await take_all(w.engine)) == 4
    assert len(asked) == 24
    assert asked == [None] * 24


async def test_a_body_that_raises_keeps_the_version_and_resumes_the_servers():
    error = RuntimeError("push failed")
    async with world(4) as w:
        with pytest.raises(RuntimeError) as caught:
            async with w.engine.weight_update(version=1):
                raise error
        assert caught.value is error
        assert w.engine.weight_version == 0
        assert w.servers.paused is None
        assert len(await take_all(w.engine)) == 4


async def test_a_server_that_names_another_version_is_an_error_and_the_version_stays():
    async with world(4) as w:
        with pytest.raises(ServerError, match=r"fake.*7"):
            async with w.engine.weight_update(version=1):
                w.servers.set_version(7)
        assert w.engine.weight_version == 0
        assert w.servers.paused is None


async def test_a_server_that_names_no_number_is_taken_at_the_trainers_word(caplog):
    async with world(4, servers=FakeServers(names_version=lambda _: None)) as w:
        async with w.engine.weight_update(version=5):
            pass
        assert w.engine.weight_version == 5
        assert "trusted without a check" in caplog.text


async def test_a_server_that_cannot_be_paused_is_named_and_the_body_does_not_run():
    class Unpausable(FakeServers):
        async def pause(self, mode):
            raise ServerError("http://a: no answer to pause_generation within 30 s")

    async with world(4, servers=Unpausable()) as w:
        with pytest.raises(ServerError, match="http://a"):
            async with w.engine.weight_update(version=1):
                raise AssertionError("the body ran")
        assert len(await take_all(w.engine)) == 4


@pytest.mark.parametrize("version", [0, -1])
async def test_a_version_that_is_not_above_the_current_one_is_refused(version):
    async with world(2) as w:
        with pytest.raises(ValueError, match="above the current version 0"):
            async with w.engine.weight_update(version=version):
                pass


async def test_overlapping_windows_are_refused():
    async with world(2) as w, w.engine.weight_update(version=1):
        w.servers.set_version(1)
        with pytest.raises(trio.BusyResourceError):
            async with w.engine.weight_update(version=2):
                pass


async def test_inside_ones_own_window_waiting_calls_are_refused():
    async with world(4) as w, w.engine.weight_update(version=1):
        w.servers.set_version(1)
        with pytest.raises(RuntimeError, match="weight_update"):
            await w.engine.next_batch(1)
        with pytest.raises(RuntimeError, match="weight_update"):
            await w.engine.drain()
        with pytest.raises(RuntimeError, match="weight_update"):
            await w.engine.evaluate(w.source)


async def test_inside_ones_own_window_ready_groups_can_be_taken():
    async with world(4) as w:
        await trio.sleep(10)
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
            assert len((await w.engine.next_batch(2)).groups) == 2


async def test_another_task_may_wait_through_the_window():
    async with world(4, plan=lambda *_: Say(seconds=5)) as w, trio.open_nursery() as nursery:
        nursery.start_soon(take_all, w.engine)
        await trio.sleep(1)
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
            await trio.sleep(20)
        assert w.engine.statistics().acked == 0
    assert w.engine.statistics().acked == 4


async def test_cancelled_in_its_body_the_servers_are_resumed_and_the_version_stays():
    async with world(4) as w:
        with trio.move_on_after(5) as scope:
            async with w.engine.weight_update(version=1):
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert w.servers.paused is None
        assert w.engine.weight_version == 0
        assert len(await take_all(w.engine)) == 4


async def test_how_long_each_step_took_is_told():
    async with world(4) as w:
        async with w.engine.weight_update(version=1) as window:
            w.servers.set_version(1)
            await trio.sleep(3)
        assert set(window.seconds) == {"pause", "quiet", "body", "confirm", "resume", "open"}
        assert window.seconds["body"] == 3


async def test_a_call_that_ignores_the_pause_does_not_hold_the_window():
    """A second after the last one that came back, the call is given up and its group requeued; the body runs."""

    class Deaf(FakeServers):
        def abort_all(self):
            pass

    async with world(
        2, servers=Deaf(plan=lambda n, _: Say(seconds=500 if n < 4 else 1)), deadlines={"abort": 5.0}
    ) as w:
        await trio.sleep(1)
        began = trio.current_time()
        async with w.engine.weight_update(version=1):
            assert trio.current_time() - began == pytest.approx(1.0)
            w.servers.set_version(1)
        assert len(await take_all(w.engine)) == 2
        assert w.engine.statistics().retries[Cause.WEIGHT_UPDATE] == 4


async def test_what_ran_before_the_window_may_wait_through_it_though_its_owner_started_it():
    """A periodic evaluation beside the training loop, in the loop's own nursery."""
    found = []
    async with world(4) as w, trio.open_nursery() as nursery:

        async def evaluate(started):
            started.set()
            await trio.sleep(1)
            found.extend(await w.engine.evaluate(IterableSource(prompts(1, prefix="e"))))
            found.extend((await w.engine.next_batch(1)).groups)

        started = trio.Event()
        nursery.start_soon(evaluate, started)
        await started.wait()
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
            await trio.sleep(5)
    assert len(found) == 2


async def test_what_a_windows_body_starts_is_inside_it():
    async with world(4) as w:
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
            with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="weight_update block")):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(w.engine.next_batch, 4)
        await take_all(w.engine)


async def test_a_window_with_no_server_left_says_so(caplog):
    class Gone(FakeServers):
        async def versions(self):
            await trio.lowlevel.checkpoint()
            return {}

    async with world(2, servers=Gone()) as w, w.engine.weight_update(version=1):
        pass
    assert "no server answers" in caplog.text
