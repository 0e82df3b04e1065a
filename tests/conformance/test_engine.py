"""The whole engine with eight rollouts in flight: whatever ends them, nothing of theirs runs on the server afterwards."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from trio_rollout import (
    Cause,
    Deadlines,
    EngineSettings,
    IterableSource,
    PauseMode,
    Prompt,
    Retry,
    RolloutEngine,
    SamplingParams,
    SingleTurn,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.errors import RolloutError

from ._server import Server

IN_FLIGHT = 8
QUEUED = 4
"""The servers' ``max_queued``."""
LONG = SingleTurn(SamplingParams(max_new_tokens=1000, ignore_eos=True))
SHORT = SingleTurn(SamplingParams(max_new_tokens=300, ignore_eos=True))
SETTINGS = EngineSettings(samples_per_prompt=4, max_running=IN_FLIGHT, retry=Retry(max_attempts=1, backoff_base=0.0))


def source(count: int) -> IterableSource:
    """So many short prompts."""
    return IterableSource([Prompt(id=f"p{number}", input_ids=[5, 6, 7, 8 + number]) for number in range(count)])


@asynccontextmanager
async def running_engine(
    server: Server, generate: SingleTurn = LONG, *, groups: int = 2, settings: EngineSettings = SETTINGS
) -> AsyncGenerator[RolloutEngine]:
    """An engine with eight rollouts that the server decodes; after it was left the server is idle by itself."""
    async with (
        open_sglang_servers([server.target.url]) as servers,
        open_rollout_engine(source(groups), generate, servers=servers, settings=settings) as engine,
    ):
        # What has a deadline may have met it before it was seen running.
        await server.until(lambda load: load["num_running_reqs"] == IN_FLIGHT or engine.quarantined())
        yield engine
    with trio.fail_after(10):
        await server.until_idle()


@pytest.mark.parametrize("which", ["turn", "rollout", "group"])
async def test_a_deadline_ends_what_runs_on_the_server(server: Server, which: str):
    deadlines = attrs.evolve(Deadlines(), **{which: 2.0})
    async with running_engine(server, settings=attrs.evolve(SETTINGS, deadlines=deadlines)) as engine:
        with pytest.raises(RolloutError, match="no group was delivered"):
            await anext(engine.batches(1))
        assert [report.cause for report in engine.quarantined()] == [Cause.DEADLINE] * 2
        with trio.fail_after(10):
            await server.until_idle()


async def test_a_cancelled_engine_leaves_nothing_running(server: Server):
    with trio.CancelScope() as scope:
        async with running_engine(server):
            scope.cancel()
            await trio.sleep_forever()
    with trio.fail_after(10):
        await server.until_idle()


async def test_a_drain_leaves_nothing_running(server: Server):
    async with running_engine(server, groups=4) as engine:
        await engine.drain(grace=0.5)
        counts = engine.statistics()
        assert (counts.running, counts.returned) == (0, counts.pulled)
        with trio.fail_after(10):
            await server.until_idle()


@pytest.mark.parametrize("mode", PauseMode)
async def test_a_weight_update_with_eight_in_flight(server: Server, mode: PauseMode):
    """ABORT: all of them run again. IN_PLACE: they go on, and their spans say so.

    RETRACT: those that the server's queue has room for go on. The server refuses the others as busy, so they start over; any
    of the eight may be among them.
    """
    restarted = {PauseMode.ABORT: IN_FLIGHT, PauseMode.RETRACT: IN_FLIGHT - QUEUED, PauseMode.IN_PLACE: 0}[mode]
    async with running_engine(server, SHORT) as engine:
        before, after = engine.weight_version, engine.weight_version + 1
        async with engine.weight_update(version=after, mode=mode) as window:
            await server.post("/update_weight_version", new_version=str(after), abort_all_requests=False)
            if mode is PauseMode.ABORT:
                await server.until_idle()
        groups = [group async for batch in engine.batches(1) for group in batch.groups]
        counts = engine.statistics()
    segments = [row.segments[0] for group in groups for row in group.trajectories]
    assert [len(segment.log_probs) for segment in segments] == [300] * IN_FLIGHT
    assert counts.retries[Cause.WEIGHT_UPDATE] == (IN_FLIGHT if mode is PauseMode.ABORT else 0)
    versions = sorted(tuple(span.version for span in segment.versions) for segment in segments)
    assert versions == [(before, after)] * (IN_FLIGHT - restarted) + [(after,)] * restarted
    assert {"pause", "body", "confirm", "resume", "open"} <= window.seconds.keys()


async def test_with_partial_an_aborted_turn_goes_on_from_what_it_has(server: Server):
    async with running_engine(server, SHORT, settings=attrs.evolve(SETTINGS, partial=True)) as engine:
        before, after = engine.weight_version, engine.weight_version + 1
        async with engine.weight_update(version=after, mode=PauseMode.ABORT):
            await server.post("/update_weight_version", new_version=str(after), abort_all_requests=False)
        groups = [group async for batch in engine.batches(1) for group in batch.groups]
    assert {group.attempt for group in groups} == {1}
    for row in [row for group in groups for row in group.trajectories]:
        (segment,) = row.segments
        assert len(segment.log_probs) == len(segment.loss_mask) == 300
        assert [span.version for span in segment.versions] in ([before, after], [after])
