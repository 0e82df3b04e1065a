"""Idle connections: closed when they are due, and when the server closes them, though nothing is sent any more."""

import pytest
import trio

from trio_rollout.sglang import ServerSettings
from trio_rollout.testing import Run

from .helpers import FIVE, PROMPT, memory_world, socket_world


async def burst(run, count):
    """Have so many requests at once, and all their connections idle then."""
    done = trio.Event()
    run.fake.plan = lambda seen: Run(until=done) if seen.path == "/generate" else None
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        await run.fake.until(lambda: run.fake.in_flight == count)
        done.set()
    run.fake.plan = ()


async def test_f120_after_a_burst_the_idle_connections_are_closed_when_they_are_due(autojump_clock):
    async with memory_world() as run:
        await burst(run, 51)
        assert run.servers.statistics().connections >= 51
        await trio.sleep(3.9)
        assert run.servers.statistics().connections >= 51
        await trio.sleep(0.2)
        assert run.servers.statistics().connections == 0
        assert run.fake.connections == 0


async def test_f120_a_connection_that_is_used_stays_and_the_others_go(autojump_clock):
    """One request after the other keeps one connection; the surplus of a burst is closed beside it."""
    async with memory_world() as run:
        await burst(run, 20)
        for _ in range(40):
            await run.servers.generate(PROMPT, FIVE)
            await trio.sleep(0.2)
        assert run.servers.statistics().connections == 1
        before = run.fake.accepted
        await run.servers.generate(PROMPT, FIVE)
        assert run.fake.accepted == before


@pytest.mark.parametrize("after", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("count", [1, 30])
async def test_f120_connections_that_the_server_closes_are_noticed(autojump_clock, count, after):
    """Within a second of the last use or of the close, whichever is later; not only after the whole idle time."""
    async with memory_world(settings=ServerSettings(vocab_size=1000, idle=3600)) as run:
        await burst(run, count)
        await trio.sleep(after)
        run.fake.kill()
        await trio.sleep(1.1)
        assert run.servers.statistics().connections == 0
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist()


async def test_f120_a_watched_connection_can_be_used_and_is_watched_again(autojump_clock):
    async with memory_world(settings=ServerSettings(vocab_size=1000, idle=10)) as run:
        for _ in range(5):
            await run.servers.generate(PROMPT, FIVE)
            await trio.sleep(2.5)
        assert run.fake.accepted == 2  # control and generation
        await trio.sleep(9)
        assert run.servers.statistics().connections == 0


async def test_f120_on_sockets_a_closed_connection_leaves_no_close_wait():
    async with socket_world(settings=ServerSettings(vocab_size=1000, idle=3600)) as run:
        await burst(run, 10)
        run.fake.kill()
        with trio.fail_after(10):
            while run.servers.statistics().connections:
                await trio.sleep(0.05)


@pytest.mark.parametrize("idle", [0.0, 0.5])
async def test_f120_a_short_idle_time_holds_too(autojump_clock, idle):
    async with memory_world(settings=ServerSettings(vocab_size=1000, idle=idle)) as run:
        await burst(run, 5)
        await trio.sleep(idle + 0.1)
        assert run.servers.statistics().connections == 0
