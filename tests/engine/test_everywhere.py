"""Cancelled at any step, raising at any await: every group is settled or still owned, nothing runs on (P2, P3).

Groups, samples and tokens are conserved between any two steps of each run (P1, P11).
"""

import attrs
import pytest
import trio

from trio_rollout import Keep, Resume
from trio_rollout.errors import EndOfData, RolloutError
from trio_rollout.sources import IterableSource
from trio_rollout.testing import Fail, FakeServers, Say, cancel_everywhere, is_conserved, prompts, throw_everywhere

from .conftest import one, world


class Kept:
    """A source that keeps the prompts that it was given back."""

    def __init__(self, count):
        self.inner, self.returned = IterableSource(prompts(count)), []

    async def take(self, count):
        await trio.lowlevel.checkpoint()
        return await self.inner.take(count)

    async def give_back(self, prompts):
        await trio.lowlevel.checkpoint()
        self.returned.extend(prompt.id for prompt in prompts)

    def state(self):
        return {}


@attrs.define
class State:
    servers: FakeServers
    source: Kept
    engine: object = None
    delivered: list = attrs.field(factory=list)
    told: object = None

    def check(self, count, *, all_of_them):
        counts = self.engine.statistics() if self.engine else None
        assert self.servers.running == 0
        assert self.servers.paused is None
        if counts is None:
            return
        assert is_conserved(counts), counts
        assert counts.running_rollouts == 0, counts
        assert counts.running == 0, counts
        assert len(set(self.delivered)) == len(self.delivered)
        given_up = [report.id.prompt for report in self.engine.quarantined()]
        owned = set(self.delivered) | set(self.source.returned) | set(given_up)
        assert len(owned) == len(self.delivered) + len(self.source.returned) + len(given_up)
        assert counts.pulled == len(owned), (counts, owned)
        assert counts.delivered == len(self.delivered)
        if all_of_them:
            assert len(self.delivered) + len(given_up) == count, counts


def faulty(number, _):
    """Every fourth call fails, every seventh hangs until its turn's deadline."""
    if number % 4 == 3:
        return Fail(ValueError("drawn"), 0.5)
    return Say(seconds=1 + number % 3)


VARIANTS = {
    "happy": {},
    "slow consumer": {"pause": 7.0},
    "full buffer": {"pause": 7.0, "max_ready": 1, "max_running": 8},
    "faults": {"plan": faulty, "max_running": 8},
    "faults, turns come back": {"plan": faulty, "max_running": 8, "resume": Resume.TURNS},
}
COUNT = 5


def scenario_of(work, variant):
    """Return a scenario that runs ``work(arm, state, pause, options)``, which arms the scope that is to be cancelled."""
    options = dict(VARIANTS[variant])
    pause = options.pop("pause", 0.0)
    options.pop("plan", None)

    async def scenario(arm):
        state = arm.keep(State(FakeServers(plan=VARIANTS[variant].get("plan", lambda *_: Say())), Kept(COUNT)))
        await work(arm, state, pause, options)
        return state

    return scenario


async def whole_engine(arm, state, pause, options):
    with trio.CancelScope() as scope:
        arm(scope)
        async with world(source=state.source, servers=state.servers, invariants=arm.invariants, **options) as w:
            state.engine = w.engine
            while True:
                await trio.sleep(pause)
                batch = await _next(w.engine, state)
                if batch is None:
                    break


async def _next(engine, state):
    try:
        batch = await engine.next_batch(2)
    except EndOfData:
        return None
    state.delivered.extend(group.prompt.id for group in batch.groups)
    return batch


async def one_call(arm, state, pause, options, call):
    """One call is cancelled; then the engine does the rest of its job as if nothing had happened."""
    async with world(source=state.source, servers=state.servers, invariants=arm.invariants, **options) as w:
        state.engine = w.engine
        await trio.sleep(pause + 1.5)
        with trio.CancelScope() as scope:
            arm(scope)
            await call(w.engine, state)
        while await _next(w.engine, state) is not None:
            await trio.sleep(pause)


async def update(engine, state):
    async with engine.weight_update(version=engine.weight_version + 1):
        await trio.sleep(1)
        state.servers.set_version(engine.weight_version + 1)


async def evaluate(engine, state):
    await engine.evaluate(IterableSource(prompts(2, prefix="e")))


CALLS = {"next_batch": _next, "weight_update": update, "evaluate": evaluate}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_cancelled_from_outside_at_any_step(variant):
    def check(state, point):
        state.check(COUNT, all_of_them=point is None)

    sweep = cancel_everywhere(scenario_of(whole_engine, variant), check, sample=150)
    assert not sweep.failures, sweep


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_cancelled_at_any_step_loses_nothing(name, variant):
    async def work(arm, state, pause, options):
        await one_call(arm, state, pause, options, CALLS[name])

    def check(state, point):
        state.check(COUNT, all_of_them=True)

    sweep = cancel_everywhere(scenario_of(work, variant), check, sample=60)
    assert not sweep.failures, sweep


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_drain_cancelled_at_any_step_leaves_every_group_owned(variant):
    async def drain(engine, state):
        await engine.drain(grace=2)

    async def work(arm, state, pause, options):
        async with world(source=state.source, servers=state.servers, invariants=arm.invariants, **options) as w:
            state.engine = w.engine
            await trio.sleep(1.5)
            with trio.CancelScope() as scope:
                arm(scope)
                await drain(w.engine, state)

    def check(state, point):
        state.check(COUNT, all_of_them=False)
        counts = state.engine.statistics()
        assert counts.returned + counts.quarantined == counts.pulled

    sweep = cancel_everywhere(scenario_of(work, variant), check, sample=60)
    assert not sweep.failures, sweep


async def generate(prompt, rollout):
    await trio.lowlevel.checkpoint()
    turn = await rollout.generate(rollout.input)
    await trio.lowlevel.checkpoint()
    return rollout.finish([turn])


async def group_reward(group):
    await trio.lowlevel.checkpoint()
    return [1.0] * len(group.trajectories)


async def group_filter(group):
    await trio.lowlevel.checkpoint()
    return Keep()


async def slow_one(trajectory):
    await trio.sleep(0.5)
    return await one(trajectory)


@pytest.mark.parametrize("variant", VARIANTS)
def test_user_code_raising_at_any_await_is_a_requeue_or_a_recorded_failure(variant):
    options = {key: value for key, value in VARIANTS[variant].items() if key != "pause"}
    pause = VARIANTS[variant].get("pause", 0.0)

    async def scenario(faults):
        plan = options.get("plan", lambda *_: Say())
        state = faults.keep(State(FakeServers(plan=plan), Kept(COUNT)))
        rest = {key: value for key, value in options.items() if key != "plan"}
        async with world(
            source=state.source,
            servers=state.servers,
            generate=faults(generate),
            reward=faults(slow_one),
            group_reward=faults(group_reward),
            group_filter=faults(group_filter),
            invariants=faults.invariants,
            **rest,
        ) as w:
            state.engine = w.engine
            while await _next(w.engine, state) is not None:
                await trio.sleep(pause)
        return state

    sweep = throw_everywhere(scenario, lambda state, point: state.check(COUNT, all_of_them=True), sample=100)
    assert not sweep.failures, sweep


def test_a_source_raising_at_any_await_reaches_the_consumer():
    async def scenario(faults):
        state = faults.keep(State(FakeServers(), Kept(COUNT)))
        state.source.take = faults(state.source.take)
        try:
            async with world(source=state.source, servers=state.servers, invariants=faults.invariants) as w:
                state.engine = w.engine
                while await _next(w.engine, state) is not None:
                    pass
        except RolloutError as error:
            state.told = error
        return state

    def check(state, point):
        state.check(COUNT, all_of_them=point is None)
        assert (state.told is None) == (point is None)

    sweep = throw_everywhere(scenario, check)
    assert not sweep.failures, sweep
