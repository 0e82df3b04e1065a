"""The time of a tool: nested, and with a margin in which its result still counts."""

import math

import pytest
import trio

from trio_rollout._core.settings import Deadlines
from trio_rollout.tools import RolloutTools, open_rollout_tools

from .fake_child import FakeBackend


@pytest.mark.parametrize(
    ("asked", "allowed", "remaining", "budget"),
    [
        (None, 300.0, math.inf, 300.0),
        (None, None, math.inf, None),
        (None, 0.0, math.inf, None),
        (10.0, 300.0, math.inf, 10.0),
        (600.0, 300.0, math.inf, 600.0),  # who asks knows better than the default
        (None, 300.0, 100.0, 99.0),
        (10.0, None, 2.0, 1.8),
        (None, None, -3.0, 0.0),
    ],
)
async def test_a_tool_gets_what_is_allowed_and_left(autojump_clock, asked, allowed, remaining, budget):
    deadline = trio.current_time() + remaining
    async with open_rollout_tools(deadline=deadline, deadlines=Deadlines(tool=allowed)) as tools:
        assert tools.budget(asked) == pytest.approx(budget)


async def test_a_commands_time_is_cut_to_what_remains_of_the_rollout(autojump_clock):
    """F037: a command ends as an observation before the rollout's deadline would cancel it, also after a slow start."""
    backend = FakeBackend()
    backend.hold = trio.Event()
    began = trio.current_time()
    with trio.move_on_after(5) as rollout:
        tools = RolloutTools(deadline=rollout.deadline, deadlines=Deadlines(tool=300))
        tools._supervisor = backend
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def start_slowly():
                await trio.sleep(2)
                backend.hold.set()

            result = await tools.run_captured(["play"], timeout=60)

    assert result.timed_out
    assert trio.current_time() - began == pytest.approx(4.5, abs=0.01)
    assert not rollout.cancelled_caught


async def test_output_is_told_as_progress():
    told = []
    async with open_rollout_tools(on_output=lambda: told.append(True)) as tools:
        await tools.run_captured(["echo", "x"])

    assert told
