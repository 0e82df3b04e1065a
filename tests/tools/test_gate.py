"""The parallel gate: sharing, exclusion, fairness, and waiters that give up."""

import pytest
import trio

from trio_rollout.tools._dispatch.gate import ParallelGate


class Visitors:
    """Start visitors, see who is inside, let them out."""

    def __init__(self, nursery):
        self.gate = ParallelGate()
        self.inside = []
        self.nursery = nursery
        self.out = {}
        self.scopes = {}

    async def visit(self, name):
        """``name`` beginning with r shares. Returns once everything has settled."""
        self.out[name], self.scopes[name] = trio.Event(), trio.CancelScope()

        async def go():
            with self.scopes[name]:
                async with self.gate.hold(shares=name.startswith("r")):
                    self.inside.append(name)
                    try:
                        await self.out[name].wait()
                    finally:
                        self.inside.remove(name)

        self.nursery.start_soon(go)
        await trio.sleep(1)

    async def leave(self, name):
        self.out[name].set()
        await trio.sleep(1)

    async def give_up(self, name):
        self.scopes[name].cancel()
        await trio.sleep(1)


@pytest.fixture
async def visitors(nursery):
    return Visitors(nursery)


async def test_sharing_ones_overlap(autojump_clock, visitors):
    for name in ("r1", "r2", "r3"):
        await visitors.visit(name)

    assert visitors.inside == ["r1", "r2", "r3"]


async def test_an_exclusive_one_is_alone(autojump_clock, visitors):
    await visitors.visit("w1")
    await visitors.visit("r1")
    await visitors.visit("w2")
    assert visitors.inside == ["w1"]

    await visitors.leave("w1")
    assert visitors.inside == ["r1"]

    await visitors.leave("r1")
    assert visitors.inside == ["w2"]


async def test_a_sharing_one_behind_a_queued_exclusive_one_waits(autojump_clock, visitors):
    for name in ("r1", "w1", "r2"):
        await visitors.visit(name)
    assert visitors.inside == ["r1"]

    await visitors.leave("r1")
    assert visitors.inside == ["w1"]


async def test_a_cancelled_exclusive_waiter_leaves_the_queue_and_lets_in_those_behind_it(autojump_clock, visitors):
    for name in ("r1", "w1", "r2", "r3"):
        await visitors.visit(name)
    await visitors.give_up("w1")

    assert sorted(visitors.inside) == ["r1", "r2", "r3"]
    assert repr(visitors.gate) == "<ParallelGate 3 sharing, 0 waiting>"


async def test_let_in_and_cancelled_in_the_same_tick_the_gate_is_not_kept(autojump_clock, visitors):
    await visitors.visit("w1")
    await visitors.visit("w2")
    await visitors.visit("r1")
    visitors.out["w1"].set()
    await trio.lowlevel.checkpoint()
    visitors.scopes["w2"].cancel()
    await trio.sleep(1)

    assert visitors.inside == ["r1"]
    await visitors.leave("r1")
    assert repr(visitors.gate) == "<ParallelGate 0 sharing, 0 waiting>"
