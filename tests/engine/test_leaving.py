"""Draining and leaving: the groups that go back, those that stay deliverable, and the time that it may take."""

import pytest
import trio

from trio_rollout import Cause, PauseMode, Retry
from trio_rollout._core.ledger_events import Recovered
from trio_rollout.errors import EngineClosed
from trio_rollout.sources import IterableSource
from trio_rollout.testing import HANG, FakeServers, Say, prompts

from .conftest import one, take_all, world


class Remembering:
    """A source that keeps the prompts that it was given back."""

    def __init__(self, count=10):
        self.inner, self.returned = IterableSource(prompts(count)), []

    async def take(self, count):
        return await self.inner.take(count)

    async def give_back(self, prompts):
        await trio.lowlevel.checkpoint()
        self.returned.extend(prompt.id for prompt in prompts)

    def state(self):
        return self.inner.state()


class Forgetful:
    """A ledger that keeps nothing: unfinished groups stay with it all the same."""

    async def begin(self, identity):
        return Recovered()

    async def record(self, events):
        await trio.lowlevel.checkpoint()


async def test_drain_lets_running_groups_finish_within_the_grace():
    async with world(10, plan=lambda *_: Say(seconds=5)) as w:
        await trio.sleep(1)
        await w.engine.drain(grace=10)
        counts = w.engine.statistics()
        assert (counts.ready, counts.running, counts.waiting) == (2, 0, 0)
        assert len(await take_all(w.engine)) == 2


async def test_drain_cancels_the_rest_and_gives_it_back_to_the_source():
    source = Remembering()
    async with world(source=source, plan=lambda *_: Say(seconds=50)) as w:
        await trio.sleep(1)
        began = trio.current_time()
        await w.engine.drain(grace=3)
        assert trio.current_time() - began == 3
        counts = w.engine.statistics()
        assert counts.requeues[Cause.SHUTDOWN] == 0  # returned, not requeued
        assert counts.returned == counts.pulled
        assert len(source.returned) == counts.pulled
        with pytest.raises(EngineClosed):
            await w.engine.next_batch(1)


@pytest.mark.parametrize(
    ("end", "cause"), [("cancelled", Cause.CANCELLED), ("left", Cause.SHUTDOWN), ("drained", Cause.SHUTDOWN)]
)
async def test_cancelled_from_outside_and_shut_down_are_two_causes(end, cause):
    """F018. The group's deadline is a third cause, and it wins if it has passed."""
    told = []

    async def generate(prompt, rollout):
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            told.append(str(error))
            raise

    with trio.CancelScope() as scope:
        async with world(2, generate=generate) as w:
            await trio.sleep(1)
            if end == "cancelled":
                scope.cancel()
                await trio.sleep_forever()
            if end == "drained":
                await w.engine.drain(grace=0)
    assert told
    assert all(f"{cause.value}: the engine drains" in words for words in told)


async def test_a_consumer_hears_of_the_end_after_a_drain_was_cancelled():
    """Admission stays closed, so the groups that wait will never run: they are given back once the others have ended."""
    async with world(10, plan=lambda *_: Say(seconds=5)) as w:
        await trio.sleep(1)
        with trio.move_on_after(1):
            await w.engine.drain(grace=100)
        assert len(await take_all(w.engine, 1)) == 2
        counts = w.engine.statistics()
        assert (counts.acked, counts.returned) == (2, counts.pulled - 2)
        assert counts.returned


async def test_prompts_are_given_back_once_although_the_drain_is_cancelled_while_the_source_takes_them():
    class Slow(Remembering):
        async def give_back(self, prompts):
            self.returned.extend(prompt.id for prompt in prompts)
            taking.set()
            await trio.sleep(1)

    taking, scope = trio.Event(), trio.CancelScope()
    async with world(source=Slow(), plan=lambda *_: HANG) as w, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def cancel():
            await taking.wait()
            scope.cancel()

        await trio.sleep(1)
        with scope:
            await w.engine.drain(grace=0)
    assert scope.cancel_called
    assert len(set(w.source.returned)) == len(w.source.returned) == w.engine.statistics().returned


async def test_a_waiting_consumer_hears_of_a_drain():
    async with world(4, plan=lambda *_: HANG) as w, trio.open_nursery() as nursery:

        async def consume():
            with pytest.raises(EngineClosed):
                await w.engine.next_batch(1)

        nursery.start_soon(consume)
        await trio.sleep(1)
        await w.engine.drain(grace=0)


async def test_a_drain_does_not_wait_for_groups_that_back_off():
    retry = Retry(backoff_base=100.0, backoff_max=100.0, jitter=0.0)
    async with world(source=Remembering(2), plan=lambda *_: HANG, retry=retry, deadlines={"group": 1.0}) as w:
        await trio.sleep(3)
        assert (w.engine.statistics().waiting, w.engine.statistics().requeues[Cause.DEADLINE]) == (2, 2)
        began = trio.current_time()
        await w.engine.drain(grace=50)
        assert trio.current_time() == began
        assert sorted(w.source.returned) == ["p0", "p1"]


async def test_a_second_drain_does_nothing():
    async with world(4) as w:
        await w.engine.drain()
        await w.engine.drain()


async def test_of_several_drains_the_shortest_grace_counts():
    async with world(4, plan=lambda *_: HANG) as w, trio.open_nursery() as nursery:
        await trio.sleep(1)
        nursery.start_soon(w.engine.drain, 3600.0)
        await trio.sleep(1)
        began = trio.current_time()
        await w.engine.drain(0)
        assert trio.current_time() - began < 1
        assert w.engine.statistics().returned == w.engine.statistics().pulled > 0


async def test_a_body_that_fails_leaves_at_once_although_another_task_drains_with_a_long_grace():
    source = Remembering(4)
    async with trio.open_nursery() as outside:
        with pytest.raises(ValueError, match="trainer"):
            async with world(source=source, plan=lambda *_: HANG) as w:
                await trio.sleep(1)
                outside.start_soon(w.engine.drain, 3600.0)
                await trio.sleep(1)
                began = trio.current_time()
                raise ValueError("trainer")
        assert trio.current_time() - began < 1
        assert len(source.returned) == w.engine.statistics().pulled > 0


async def test_leaving_returns_what_is_ready_and_untaken():
    source = Remembering(2)
    async with world(source=source) as w:
        await trio.sleep(20)
        assert w.engine.statistics().ready == 2
    assert sorted(source.returned) == ["p0", "p1"]


async def _judge_hangs(trajectory):
    await trio.sleep_forever()


@pytest.mark.parametrize("state", ["running", "judge", "full", "gated", "consumer"])
async def test_leaving_is_bounded_in_every_state(state):
    """P9: leaving takes at most Deadlines.drain in all, in every state of the engine."""
    plan = (lambda *_: HANG) if state == "running" else (lambda *_: Say())
    reward = _judge_hangs if state == "judge" else one
    async with world(20, plan=plan, reward=reward, max_ready=1, deadlines={"drain": 20.0}) as w:
        await trio.sleep(10)
        if state == "gated":
            with pytest.raises(ZeroDivisionError):
                async with w.engine.weight_update(version=1, mode=PauseMode.IN_PLACE):
                    raise ZeroDivisionError
        began = trio.current_time()
    assert trio.current_time() - began <= 20


async def test_a_keyboard_interrupt_in_user_code_comes_out_bare():
    servers = FakeServers()

    async def interrupted(trajectory):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        async with world(4, servers=servers, reward=interrupted):
            await trio.sleep_forever()
    assert servers.running == 0


async def test_work_that_finishes_during_a_drain_waits_for_no_room():
    """F052: at a shutdown with a full buffer and no consumer, the running groups become ready all the same."""
    async with world(8, max_ready=1, max_running=8) as w:
        await trio.sleep(5)
        assert w.engine.statistics().ready == 1
        await w.engine.drain(grace=1)
        counts = w.engine.statistics()
        assert counts.ready == 4
        assert counts.ready + counts.returned == counts.pulled
        assert len(await take_all(w.engine)) == counts.ready


@pytest.mark.parametrize("ledger", [False, True])
async def test_f127_a_cleanup_that_outlasts_the_drain_loses_no_prompt_and_no_waiter(ledger):
    """The block is left late; then every prompt is given back, and a consumer in an outer task hears of the end."""
    source, heard = Remembering(6), []

    async def generate(prompt, rollout):
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(60)

    async def consume(engine):
        with pytest.raises(EngineClosed):
            await engine.next_batch(1)
        heard.append(trio.current_time())

    async def drain(engine):
        await engine.drain(grace=3600)
        heard.append(trio.current_time())

    async with trio.open_nursery() as outside:
        kept = {"ledger": Forgetful()} if ledger else {}
        async with world(source=source, generate=generate, deadlines={"drain": 10.0}, **kept) as w:
            await trio.sleep(1)
            outside.start_soon(consume, w.engine)
            outside.start_soon(drain, w.engine)
            await trio.sleep(1)
            left = trio.current_time()
        counts = w.engine.statistics()
        assert trio.current_time() - left == (65 if ledger else 60)  # the grace of a ledger's drain, and the cleanup
        assert len(source.returned) == counts.returned == (0 if ledger else counts.pulled)
        assert counts.running == 0
    assert len(heard) == 2


async def test_a_source_that_hangs_cannot_hold_up_leaving():
    """P9 holds in the last step, too."""

    class Hanging(Remembering):
        async def give_back(self, prompts):
            await trio.sleep_forever()

    async with world(source=Hanging(), plan=lambda *_: HANG, deadlines={"drain": 20.0}):
        await trio.sleep(1)
        began = trio.current_time()
    assert trio.current_time() - began <= 20


async def test_a_drain_with_a_long_grace_gives_back_although_its_time_is_used_up():
    """The time for giving back begins when the last attempt has ended."""

    class Slow(Remembering):
        async def give_back(self, prompts):
            await trio.sleep(2)
            await super().give_back(prompts)

    async def generate(prompt, rollout):
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)

    async with world(source=Slow(), generate=generate) as w:
        await trio.sleep(1)
        await w.engine.drain(grace=100)
        assert len(w.source.returned) == w.engine.statistics().returned == w.engine.statistics().pulled > 0
