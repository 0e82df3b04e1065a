"""Edges of the engine's end, and of weight windows around it."""

from contextlib import suppress

import pytest
import trio

from tests.sglang.helpers import FIVE, memory_world
from trio_rollout import PauseMode, SingleTurn, open_rollout_engine
from trio_rollout._core.events import ServersStayedPaused
from trio_rollout.errors import EngineClosed, RolloutError
from trio_rollout.sources import IterableSource
from trio_rollout.testing import HANG, FakeServers, Fault, Say, prompts

from .conftest import one, settings, take_all, world
from .test_leaving import Remembering


async def test_a_resume_that_raises_another_error_leaves_no_gate_closed():
    servers = FakeServers()
    async with world(6, servers=servers) as w:
        await trio.sleep(1)
        real = type(servers).resume

        async def broken(self):
            await real(self)
            raise OSError("no route")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeServers, "resume", broken)
            with suppress(OSError):
                async with w.engine.weight_update(version=1, mode=PauseMode.RETRACT):
                    servers.set_version(1)
        with trio.fail_after(100):
            assert len(await take_all(w.engine)) == 6


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_the_block_is_left_while_another_task_has_a_window_open(mode):
    async with trio.open_nursery() as outside:
        servers = FakeServers(plan=lambda *_: Say(seconds=5))
        left = trio.Event()

        async def update(engine):
            async with engine.weight_update(version=1, mode=mode):
                servers.set_version(1)
                await left.wait()

        async with world(6, servers=servers, deadlines={"drain": 20.0}) as w:
            await trio.sleep(1)
            outside.start_soon(update, w.engine)
            await trio.sleep(1)
            began = trio.current_time()
        assert trio.current_time() - began <= 20
        left.set()
    assert servers.paused is None


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.5, 6.0])
async def test_a_drain_while_another_task_has_a_window_open_and_is_cancelled(moment):
    servers = FakeServers(plan=lambda *_: Say(seconds=5))
    async with (
        world(6, servers=servers, deadlines={"drain": 20.0}, source=Remembering(6)) as w,
        trio.open_nursery() as nursery,
    ):
        await trio.sleep(1)

        @nursery.start_soon
        async def update():
            with trio.move_on_after(10):
                async with w.engine.weight_update(version=1, mode=PauseMode.RETRACT):
                    await trio.sleep_forever()

        await trio.sleep(moment)
        with trio.move_on_after(2):
            await w.engine.drain(3)
        await w.engine.drain(3)
        counts = w.engine.statistics()
        assert counts.running == counts.waiting == 0


async def test_a_drain_after_the_block_was_left_returns():
    async with world(6) as w:
        await trio.sleep(1)
    with trio.fail_after(10):
        with suppress(EngineClosed):
            await w.engine.drain()


async def test_an_engine_that_fails_while_it_drains_ends_the_drain():
    class Bad(Remembering):
        async def give_back(self, prompts):
            raise OSError("disk")

    source = Bad(6)
    with pytest.raises((RolloutError, BaseExceptionGroup)):
        async with world(source=source, plan=lambda *_: HANG) as w:
            await trio.sleep(1)
            with trio.fail_after(100):
                await w.engine.drain(1)
            with pytest.raises(RolloutError):
                await w.engine.next_batch(1)
            raise RolloutError("x")


async def test_an_evaluation_in_another_task_ends_when_the_block_is_left():
    ended = []

    async def evaluate(engine):
        try:
            await engine.evaluate(IterableSource(prompts(3)))
        except BaseException as error:
            ended.append(error)
            if not isinstance(error, Exception):
                raise

    async with trio.open_nursery() as outside:
        async with world(plan=lambda *_: HANG, deadlines={"drain": 20.0}) as w:
            await trio.sleep(1)
            outside.start_soon(evaluate, w.engine)
            await trio.sleep(1)
            began = trio.current_time()
        assert trio.current_time() - began <= 20
        await trio.testing.wait_all_tasks_blocked()
        assert [type(e) for e in ended] == [EngineClosed]


async def test_servers_that_stay_paused_are_told_to_the_instruments():
    """The window's limit and the servers' limit end at the same moment: the servers' error must not be lost."""
    told = []

    class Telling:
        def event(self, event):
            told.append(event)

    async with (
        memory_world({"/continue_generation": [Fault.HANG] * 50}) as run,
        open_rollout_engine(
            IterableSource(prompts(2)),
            SingleTurn(FIVE),
            servers=run.servers,
            reward=one,
            settings=settings(deadlines={"control": 5.0}),
            instruments=[Telling()],
        ) as engine,
        engine.weight_update(version=1, mode=PauseMode.RETRACT),
    ):
        run.fake.version = "1"
    assert [event for event in told if isinstance(event, ServersStayedPaused)]
