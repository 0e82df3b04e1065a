"""Edges of leaving a request, and of control calls and requests that outlast the block of their servers."""

from contextlib import suppress

import pytest
import trio

from trio_rollout import PauseMode
from trio_rollout.errors import ServerError
from trio_rollout.sglang import ServerSettings
from trio_rollout.testing import Fault, Run

from .helpers import FIVE, PROMPT, memory_world


async def test_a_stall_over_both_ends_of_the_abort_budget_leaves_no_abort_that_is_repeated_for_ever(autojump_clock):
    """The loop stands still from before the end of the wait to after the end of the budget."""
    async with memory_world([Fault.HANG]) as run:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.servers.generate, PROMPT, FIVE)
            await run.fake.until(lambda: run.fake.in_flight == 1)
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.sleep(0.3)
                autojump_clock.jump(100)
        await trio.sleep(5)
        before = len(run.fake.aborts)
        await trio.sleep(60)
        assert len(run.fake.aborts) == before
        assert run.servers.statistics().orphans == 1


async def test_a_pause_after_the_servers_were_left_is_an_error(autojump_clock):
    async with memory_world() as run:
        pass
    with pytest.raises((RuntimeError, ServerError)):
        await run.servers.pause(PauseMode.RETRACT)


async def test_versions_after_the_servers_were_left_is_an_error(autojump_clock):
    async with memory_world() as run:
        pass
    with pytest.raises((RuntimeError, ServerError)):
        await run.servers.versions()


async def test_a_request_that_is_being_left_when_the_servers_are_left_ends_as_cancelled(autojump_clock):
    async with trio.open_nursery() as outside:
        scope = trio.CancelScope()
        seen = []

        async def call(servers):
            with scope:
                try:
                    await servers.generate(PROMPT, FIVE)
                except BaseException as error:
                    seen.append(error)
                    raise

        async with memory_world([Fault.HANG]) as run:
            outside.start_soon(call, run.servers)
            await run.fake.until(lambda: run.fake.in_flight == 1)
            await trio.sleep(0.1)
            scope.cancel()
            await trio.sleep(0.1)
    assert [type(error) for error in seen] == [trio.Cancelled]


async def test_a_pause_in_another_task_when_the_servers_are_left(autojump_clock):
    seen = []

    async def pause(servers):
        try:
            await servers.pause(PauseMode.RETRACT)
        except BaseException as error:
            seen.append(error)
            if not isinstance(error, Exception):
                raise
        else:
            seen.append(None)

    async with trio.open_nursery() as outside, memory_world({"/pause_generation": [Fault.HANG]}) as run:
        outside.start_soon(pause, run.servers)
        await trio.sleep(1)
    assert [type(error) for error in seen] != [type(None)]


async def test_two_thousand_cancelled_calls_leave_nothing(autojump_clock):
    async with memory_world([Run()] * 2000, [Run()] * 2000) as run:
        async with trio.open_nursery() as nursery:
            for _ in range(2000):
                nursery.start_soon(run.servers.generate, PROMPT, FIVE)
            while sum(fake.in_flight for fake in run.fakes) < 2000:
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert sum(fake.in_flight for fake in run.fakes) == 0
        statistics = run.servers.statistics()
        assert (statistics.owed_aborts, statistics.orphans) == (0, 0)
        assert sum(len(set(fake.aborts)) for fake in run.fakes) == 2000
        before = sum(len(fake.aborts) for fake in run.fakes)
        await trio.sleep(30)
        assert sum(len(fake.aborts) for fake in run.fakes) == before


@pytest.mark.parametrize("moment", range(16))
async def test_owed_aborts_survive_a_server_that_flaps(autojump_clock, moment):
    """Requests are cancelled in a pause; then the server dies and comes back while its debts are being paid."""
    settings = ServerSettings(vocab_size=1000, control=3.0)
    async with memory_world(
        lambda seen: Run() if seen.path == "/generate" and seen.number < 5 else None, settings=settings
    ) as run:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(run.servers.generate, PROMPT, FIVE)
            await run.fake.until(lambda: run.fake.in_flight == 5)
            await run.servers.pause(PauseMode.RETRACT)
            nursery.cancel_scope.cancel()
        assert run.servers.statistics().owed_aborts == 5
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def flap():
                await trio.sleep(0.1 * moment)
                for _ in range(3):
                    run.host().kill()
                    await trio.sleep(0.7)
                    run.host().start()
                    await trio.sleep(1.5)

            with suppress(ServerError):
                await run.servers.resume()
        await trio.sleep(60)
        assert run.servers.statistics().owed_aborts == 0
        assert run.fake.in_flight == 0
        with trio.fail_after(60):
            await run.servers.generate(PROMPT, FIVE)
        before = len(run.fake.aborts)
        await trio.sleep(30)
        assert len(run.fake.aborts) == before
