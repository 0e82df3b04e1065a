"""A window over a server that says it is paused before it has ended what it runs, in mode ABORT."""

import pytest
import trio

from trio_rollout import PauseMode, Stop
from trio_rollout.testing import Fault, Reply, Run

from .helpers import FIVE, PROMPT, memory_world, sent


def ignores_pauses(seen):
    if seen.path == "/pause_generation":
        return Fault.IGNORE
    return Run() if seen.path == "/generate" else None


async def test_f118_what_still_runs_is_aborted_before_the_window_begins(autojump_clock):
    """The load is asked, everything is aborted, and the callers have their answers when the pause returns."""
    stops = []

    async def one(run):
        stops.append((await run.servers.generate(PROMPT, FIVE)).stop)

    async with memory_world(ignores_pauses) as run, trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(one, run)
        await run.fake.until(lambda: run.fake.in_flight == 8)
        await run.servers.pause(PauseMode.ABORT)
        assert run.fake.in_flight == 0
        assert sent(run.fake, "/v1/loads")
        assert run.fake.aborts == [""]
        await trio.testing.wait_all_tasks_blocked()
        assert stops == [Stop.ABORT] * 8
        assert run.servers.statistics().orphans == 0
        await run.servers.resume()


async def test_f118_what_cannot_be_aborted_is_counted(autojump_clock):
    """A server goes on with the eight requests of another client: the window waits for the abort budget, and counts them."""

    def deaf(seen):
        loads = {"dp_rank": 0, "num_running_reqs": 8, "num_waiting_reqs": 0}
        return Reply(body={"loads": [loads]}) if seen.path == "/v1/loads" else None

    async with memory_world() as run:
        run.fake.plan = deaf
        before = trio.current_time()
        await run.servers.pause(PauseMode.ABORT)
        assert 4.9 < trio.current_time() - before <= 5.6
        assert run.servers.statistics().orphans == 8
        await run.servers.resume()


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_f118_in_the_other_modes_requests_stay(autojump_clock, mode):
    done = trio.Event()
    async with memory_world([Run(until=done)]) as run, trio.open_nursery() as nursery:
        nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        await run.fake.until(lambda: run.fake.in_flight == 1)
        await run.servers.pause(mode)
        assert (run.fake.in_flight, run.fake.aborts) == (1, [])
        done.set()
        await run.servers.resume()


@pytest.mark.parametrize(
    "loads",
    [Reply(status=404), Reply(status=500), Reply(body=b"no"), Fault.HANG, Fault.RESET],
    ids=lambda loads: str(loads)[:20],
)
async def test_f118_a_server_that_does_not_say_what_it_runs_is_believed(autojump_clock, loads):
    """The window begins all the same, at most the abort budget later."""
    async with memory_world() as run:
        run.fake.plan = lambda seen: loads if seen.path == "/v1/loads" else None
        before = trio.current_time()
        await run.servers.pause(PauseMode.ABORT)
        assert trio.current_time() - before <= 5.6
        assert run.servers.statistics().orphans == 0
        await run.servers.resume()
