"""Dispatch under any interleaving and any cancellation: one outcome a call, and the response agrees with it."""

import attrs
import pytest
import trio

from trio_rollout.testing import Inject, cancel_everywhere, sim_run
from trio_rollout.tools import (
    AbortedOutput,
    FunctionOutput,
    RespondToModel,
    Tool,
    ToolCall,
    ToolName,
    ToolOutcome,
    ToolRuntime,
    TurnCancellation,
)

NAMES = ("shared", "alone", "shared", "failing", "none", "alone")


class Wandering(Tool):
    """A tool that takes a while at each stage, with several checkpoints."""

    def __init__(self, name, *, shares, error=None):
        self.name = ToolName(name)
        self.supports_parallel = shares
        self.error = error

    async def wait_until_ready(self):
        await trio.sleep(1)

    async def handle(self, _invocation):
        await trio.sleep(2)
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return FunctionOutput(text=f"done by {self.name}")


@attrs.define
class World:
    """Everything that listeners heard in one run of the scenario."""

    starts: list[str] = attrs.field(factory=list)
    finishes: list[tuple[str, object]] = attrs.field(factory=list)
    timed: list[str] = attrs.field(factory=list)
    results: dict[str, object] = attrs.field(factory=dict)
    runtime: ToolRuntime | None = None
    cancelled: bool = False

    async def on_tool_start(self, call):
        self.starts.append(call.call_id)
        await trio.sleep(0.5)

    async def on_tool_finish(self, call, outcome):
        self.finishes.append((call.call_id, outcome))
        await trio.sleep(0.5)

    def require_one_outcome_each(self):
        told = [call_id for call_id, _ in self.finishes]
        assert len(set(told)) == len(told), "two outcomes for one call"
        assert sorted(self.timed) == sorted(set(self.timed)), "two timings for one call"
        assert repr(self.runtime._gate) == "<ReadWriteLock 0 readers, 0 waiting>"
        outcomes = dict(self.finishes)
        for call_id, result in self.results.items():
            assert result.outcome == outcomes.get(call_id)
            assert isinstance(result.output, AbortedOutput) == (result.outcome == ToolOutcome.ABORTED)
            if result.outcome is ToolOutcome.COMPLETED:
                assert result.output.model_text().startswith("done by")
        if not self.cancelled:
            assert set(self.results) == {str(n) for n in range(len(NAMES))}


async def scenario(arm):
    """Six calls, side by side; "turn" cancels their turn, "outside" the scope around them."""
    world = World()
    tools = [
        Wandering("shared", shares=True),
        Wandering("alone", shares=False),
        Wandering("failing", shares=True, error=RespondToModel("no")),
    ]
    world.runtime = ToolRuntime(tools, listeners=[world], on_timing=lambda call, _: world.timed.append(call.call_id))
    turn = TurnCancellation()

    async def one(call_id, name):
        await trio.sleep(0.1 * int(call_id))
        world.results[call_id] = await world.runtime.call(ToolCall(call_id=call_id, name=ToolName(name)), turn=turn)

    async def watch(scope):
        with scope:
            await trio.sleep_forever()
        turn.cancel()

    with trio.CancelScope() as outside:
        arm(outside, "outside")
        async with trio.open_nursery() as watching:
            stop = trio.CancelScope()
            arm(stop, "turn")
            watching.start_soon(watch, stop)
            async with trio.open_nursery() as nursery:
                for n, name in enumerate(NAMES):
                    nursery.start_soon(one, str(n), name)
            watching.cancel_scope.cancel()
    world.cancelled = outside.cancelled_caught
    return world


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_anywhere_each_call_has_at_most_one_outcome_and_the_gate_is_free(seed):
    sweep = cancel_everywhere(
        scenario,
        lambda world, _: world.require_one_outcome_each(),
        seed=seed,
        how=[Inject.CANCEL, Inject.CANCEL_TWICE],
        sample=60,
    )

    sweep.require()
    assert sweep.points > 50


def test_fifty_interleavings_end_alike():
    for seed in range(50):
        world = sim_run(scenario, lambda *_: None, seed=seed).value
        world.require_one_outcome_each()
        assert len(world.finishes) == 5, "the tool that does not exist has no events"
