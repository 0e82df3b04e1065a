"""With a ledger, cancelled at any step: acked groups are never seen again, all others are never lost (P7).

Groups, samples and tokens are conserved between any two steps of each run (P1, P11).
"""

import attrs
import pytest
import trio

from trio_rollout import Resume
from trio_rollout.errors import EndOfData
from trio_rollout.testing import Fail, Say, cancel_everywhere, is_conserved

from .conftest import take_all
from .test_restarts import Runs

COUNT = 6


@attrs.define
class Lives:
    """Two runs over one disk: the groups that the first acked, and those that the second delivered."""

    acked: list = attrs.field(factory=list)
    later: list = attrs.field(factory=list)
    counts: object = None

    def check(self):
        assert sorted(self.acked + self.later) == [f"p{n}" for n in range(COUNT)]
        assert self.counts.acked == COUNT
        assert is_conserved(self.counts)


async def consume(engine, lives, pause):
    while True:
        await trio.sleep(pause)
        try:
            batch = await engine.next_batch(2)
        except EndOfData:
            return
        await batch.ack()
        lives.acked.extend(group.prompt.id for group in batch.groups)


def faulty(number, _):
    return Fail(ValueError("drawn"), 0.5) if number % 5 == 3 else Say()


VARIANTS = {
    "happy": {},
    "slow consumer": {"pause": 5.0},
    "full buffer": {"pause": 5.0, "max_ready": 1, "max_running": 8},
    "faults": {"plan": faulty},
    "faults, turns come back": {"plan": faulty, "resume": Resume.TURNS},
}


async def second_life(arm, runs, lives):
    async with runs.open(invariants=arm.invariants) as w:
        lives.later.extend(group.prompt.id for group in await take_all(w.engine))
        lives.counts = w.engine.statistics()
    return lives


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_cancelled_at_any_step_is_taken_up_by_the_next(variant):
    async def scenario(arm):
        options = dict(VARIANTS[variant])
        runs, lives, pause = Runs(count=COUNT), arm.keep(Lives()), options.pop("pause", 0.0)
        with trio.CancelScope() as scope:
            arm(scope)
            async with runs.open(invariants=arm.invariants, **options) as w:
                await consume(w.engine, lives, pause)
        return await second_life(arm, runs, lives)

    sweep = cancel_everywhere(scenario, lambda lives, point: lives.check(), sample=60)
    assert not sweep.failures, sweep


@pytest.mark.parametrize("call", ["next_batch", "ack"])
def test_one_call_cancelled_at_any_step_loses_nothing(call):
    """A cancelled next_batch has taken nothing, on disk neither; a cancelled ack can be made again."""

    async def scenario(arm):
        runs, lives = Runs(count=COUNT), arm.keep(Lives())
        async with runs.open(invariants=arm.invariants) as w:
            await trio.sleep(3)
            batch = await w.engine.next_batch(2) if call == "ack" else None
            with trio.CancelScope() as scope:
                arm(scope)
                if call == "ack":
                    await batch.ack()
                else:
                    batch = await w.engine.next_batch(2)
            if batch is not None:
                if w.engine.statistics().acked == 0:
                    await batch.ack()
                lives.acked.extend(group.prompt.id for group in batch.groups)
            await consume(w.engine, lives, 0.0)
            assert len(lives.acked) == COUNT, w.engine.statistics()
        return await second_life(arm, runs, lives)

    sweep = cancel_everywhere(scenario, lambda lives, point: lives.check())
    assert not sweep.failures, sweep
