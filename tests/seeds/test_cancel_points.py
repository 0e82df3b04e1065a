"""P2 and P3: every cancel point of ten operations, and drawn points of the same under trouble."""

import random
from contextlib import AsyncExitStack
from functools import partial

import attrs
import pytest
import trio

from trio_rollout import Deadlines, Retry, SamplingParams, SingleTurn
from trio_rollout.testing import FakeSGLang, Inject, Point, SimWorld, cancel_everywhere

from .coverage import POINTS
from .faults import Faulty
from .operations import OPERATIONS, WHOLE, Scene, finish, settings
from .whole_world import Noting, Story

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.seeds]
COUNT = 3
SAMPLING = SamplingParams(max_new_tokens=4)
DRAWN = 25
SEEDS = range(2)
TROUBLE = ("answer: reset", "answer: hang", "answer: 503", "answer: short_body", "abort lost", "reward raises")
VARIANTS = {
    "slow consumer": {"pause": 4.0},
    "full buffer": {"pause": 6.0, "max_ready": 1, "max_running": 8},
    "server faults": {"rate": 0.3},
}


@attrs.define(eq=False)
class State:
    """The things that a run leaves behind."""

    world: SimWorld
    story: Story = attrs.field(factory=lambda: Story(Noting(COUNT)))
    engine: object = None
    fakes: list[FakeSGLang] = attrs.field(factory=list)
    left: list[str] = attrs.field(factory=list)


async def _reward(faults, trajectory):
    await trio.sleep(0.1)
    await faults.user("reward")
    return 1.0


async def _run(name, variant, arm, state, world):
    """Open everything, run the operation in an armed scope, and let the engine finish."""
    options = {"pause": 0.0, "rate": 0.0, **variant}
    faults = Faulty(world, TROUBLE, options.pop("rate"))
    pause = options.pop("pause")
    async with trio.open_nursery() as nursery:
        for number in range(2):
            url = f"http://s{number}:1"
            fake = faults.fakes[url] = FakeSGLang()
            world.net.add_host(url, fake.serve)
        state.fakes = list(faults.fakes.values())
        scope = trio.CancelScope()
        if name in WHOLE:
            arm(scope)
            with scope:
                await _opened(name, arm, None, state, faults, nursery, pause, options)
        else:
            await _opened(name, arm, scope, state, faults, nursery, pause, options)
        arm.sometimes("cancelled", scope.cancelled_caught)
        state.story.ended_early |= name in WHOLE and scope.cancelled_caught
        faults.active = False
        for fake in state.fakes:
            with trio.move_on_after(30):
                await fake.until(lambda fake=fake: not fake.in_flight)
        state.left = [repr(fake) for fake in state.fakes if fake.in_flight or fake.paused]
        nursery.cancel_scope.cancel()
    state.left += [repr(world.net)] if world.net.connections else []


async def _opened(name, arm, scope, state, faults, nursery, pause, options):
    world, story = state.world, state.story
    more = {
        "deadlines": Deadlines(group=60, turn=10, reward=5, abort=2, control=5, drain=10),
        "retry": Retry(max_attempts=20, backoff_base=0.1),
        "failure_budget": 100,
    }
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(world.open_servers(faults.fakes))
        for url, fake in faults.fakes.items():
            fake.plan = faults.plan(url, nursery)
        story.has_ledger = name in {"whole engine with a ledger", "restore"}
        ledger = await stack.enter_async_context(world.open_ledger()) if story.has_ledger else None
        engine = state.engine = await stack.enter_async_context(
            world.open_engine(
                story.source,
                SingleTurn(SAMPLING),
                servers=servers,
                reward=partial(_reward, faults),
                ledger=ledger,
                settings=settings(**more, **options),
            )
        )
        scene = Scene(world=world, engine=engine, servers=servers, fakes=state.fakes, story=story, pause=pause)
        if scope is not None:
            arm(scope)
            with scope:
                await OPERATIONS[name](scene)
        await finish(scene)


def sweep(name, variant, *, seed, sample=None, how=(Inject.CANCEL,)):
    """Cancel the operation at its points."""

    async def scenario(arm):
        world = SimWorld(seed=seed, invariants=arm.invariants)
        state = arm.keep(State(world))
        await world.inside(partial(_run, name, variant, arm, state))
        return state

    def check(state, point: Point | None) -> None:
        assert not state.left, state.left
        if state.engine is not None:
            state.story.check(state.engine)

    return cancel_everywhere(scenario, check, seed=seed, sample=sample, how=how)


@pytest.mark.parametrize("name", [*OPERATIONS, *WHOLE])
def test_every_cancel_point(name, record_property):
    found = sweep(name, {}, seed=0)
    record_property(POINTS, {f"every point of {name}": found.points})
    found.require("cancelled")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [*OPERATIONS, *WHOLE])
def test_drawn_points_under_trouble(name, variant, record_property):
    points = 0
    for seed in SEEDS:
        found = sweep(
            name, VARIANTS[variant], seed=random.Random(f"{name}{variant}{seed}").getrandbits(32), sample=DRAWN
        )
        points += found.points
        found.require("cancelled")
    record_property(POINTS, {f"drawn points, {variant}": points})
