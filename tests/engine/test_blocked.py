"""A trainer is told when only its weight update can help: all servers restarted with old weights."""

import re

import pytest
import trio

from trio_rollout import EngineSettings, IterableSource, SamplingParams, SingleTurn
from trio_rollout.errors import ServerError
from trio_rollout.testing import FakeSGLang, SimWorld, prompts

URLS = ("http://s0:1", "http://s1:1")


def simulated(scenario, seed=0, **changes):
    """Run a scenario on an engine of four groups of one rollout, over two servers at version 3 that restarted."""

    async def whole(world):
        fakes = {url: FakeSGLang() for url in URLS}
        for url, fake in fakes.items():
            fake.version = "3"
            world.net.add_host(url, fake.serve, restarted=fake.kill)
        settings = EngineSettings(samples_per_prompt=1, max_running=2, **changes)
        generate = SingleTurn(SamplingParams(max_new_tokens=8))
        async with (
            world.open_servers(URLS) as servers,
            world.open_engine(IterableSource(prompts(4)), generate, servers=servers, settings=settings) as engine,
        ):
            for url in URLS:
                world.net.host(url).kill()
            await trio.sleep(30)
            for url, fake in fakes.items():
                fake.version = "default"
                world.net.host(url).start()
            return await scenario(engine, fakes, world)

    return SimWorld(seed=seed).run(whole).value


async def update(engine, fakes):
    async with engine.weight_update(version=4):
        for fake in fakes.values():
            fake.version = "4"


def test_a_consumer_hears_that_only_a_weight_update_helps_and_goes_on_after_it():
    async def scenario(engine, fakes, world):
        with pytest.raises(ServerError, match=re.escape("no server has weight version 3")) as raised:
            await engine.next_batch(4)
        assert all(f"{url} names 'default'" in str(raised.value) for url in fakes)
        began = trio.current_time()
        assert 60 <= began < 90  # they have been back since 30, and the control budget is 30
        with pytest.raises(ServerError, match="until a weight update"):
            await engine.next_batch(4)
        assert trio.current_time() == began
        await update(engine, fakes)
        return {group.newest_version for group in (await engine.next_batch(4)).groups}

    assert simulated(scenario) == {4}


def test_it_does_not_hear_of_it_if_a_server_with_the_right_weights_comes_back_within_the_control_budget():
    async def scenario(engine, fakes, world):
        world.net.host(URLS[1]).kill()
        await trio.sleep(20)
        fakes[URLS[1]].version = "3"
        world.net.host(URLS[1]).start()
        return {group.newest_version for group in (await engine.next_batch(4)).groups}

    assert simulated(scenario) == {3}


def test_a_host_that_says_which_weights_it_gave_the_servers_goes_on():
    async def scenario(engine, fakes, world):
        for fake in fakes.values():
            fake.version = "5"
        await engine.note_weight_version(5)
        began = trio.current_time()
        batch = await engine.next_batch(4)
        assert trio.current_time() - began < 30
        return {group.newest_version for group in batch.groups}

    assert simulated(scenario) == {5}


def test_servers_that_are_all_away_are_waited_for():
    async def scenario(engine, fakes, world):
        for url in URLS:
            world.net.host(url).kill()
        with trio.move_on_after(600) as patience:
            await engine.next_batch(4)
        assert patience.cancelled_caught

    simulated(scenario)


def test_evaluation_hears_of_it():
    async def scenario(engine, fakes, world):
        with pytest.raises(ServerError, match="until a weight update"):
            await engine.evaluate(IterableSource(prompts(2, prefix="e")))

    simulated(scenario)


def test_a_reason_that_passes_while_the_engine_drains_is_not_told():
    """The running groups get the grace of the drain, and a consumer is not told of a reason that has passed."""

    async def scenario(engine, fakes, world):
        with pytest.raises(ServerError, match="until a weight update"):
            await engine.next_batch(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.drain, 600.0)
            await trio.sleep(1)
            await update(engine, fakes)
            return {group.newest_version for group in (await engine.next_batch(1)).groups}

    assert simulated(scenario, partial=True) == {4}
