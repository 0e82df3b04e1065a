"""A world in which hosts die, lose power and are cut off while groups run for tens of seconds."""

from functools import partial

import trio

from trio_rollout import (
    Deadlines,
    EngineSettings,
    IterableSource,
    Retry,
    RolloutEngine,
    SamplingParams,
    SingleTurn,
    Trajectory,
)
from trio_rollout.errors import ServerError
from trio_rollout.testing import Action, FakeSGLang, Run, Seen, SimWorld, disturb, prompts

COUNT = 16
SETTINGS = EngineSettings(
    samples_per_prompt=2,
    max_running=8,
    deadlines=Deadlines(group=600, turn=60),
    retry=Retry(max_attempts=100, backoff_base=0.1),
    failure_budget=1000,
)


async def reward(_: Trajectory) -> float:
    """A reward that takes no time."""
    await trio.lowlevel.checkpoint()
    return 1.0


def slow(world: SimWorld, nursery: trio.Nursery) -> FakeSGLang:
    """A fake server that takes about ten seconds an answer."""

    async def finish(done: trio.Event, seconds: float) -> None:
        await trio.sleep(seconds)
        done.set()

    def plan(seen: Seen) -> Action:
        if seen.path != "/generate":
            return None
        done = trio.Event()
        nursery.start_soon(finish, done, world.rng.lognormvariate(2, 1))
        return Run(until=done)

    return FakeSGLang(plan)


def restart(fake: FakeSGLang, *, forgets: bool) -> None:
    """Start a new process: no requests, no pause. If it ``forgets``, the weights are those of its first start.

    Not every server may forget: with none at the current version nothing can run until the trainer updates the weights,
    which it does between batches only.
    """
    fake.kill()
    if forgets:
        fake.version = "default"


async def update(engine: RolloutEngine, fakes: list[FakeSGLang]) -> bool:
    """Give every server new weights; return True if that worked. If not, servers with new ones get no work until it has."""
    version = engine.weight_version + 1
    try:
        async with engine.weight_update(version=version):
            for fake in fakes:
                fake.version = str(version)
            await trio.sleep(1)
    except ServerError:
        return False
    return True


async def troubled(world: SimWorld) -> None:
    """Check that every group is delivered once in spite of the hosts' troubles."""
    got: list[str] = []
    async with trio.open_nursery() as nursery:
        fakes = {f"http://s{number}:1": slow(world, nursery) for number in range(3)}
        for number, (url, fake) in enumerate(fakes.items()):
            world.net.add_host(url, fake.serve, restarted=partial(restart, fake, forgets=number == 0))
        async with world.open_servers(fakes) as servers:
            nursery.start_soon(partial(disturb, world.net, rng=world.rng, every=(5, 30), outage=(1, 30)))
            async with world.open_engine(
                IterableSource(prompts(COUNT)),
                SingleTurn(SamplingParams(max_new_tokens=8)),
                servers=servers,
                reward=reward,
                settings=SETTINGS,
            ) as engine:
                async for batch in engine.batches(4):
                    got += [group.prompt.id for group in batch.groups]
                    await batch.ack()
                    while not await update(engine, list(fakes.values())):
                        world.sometimes("a weight update failed")
            for cause, count in engine.statistics().retries.items():
                world.sometimes(f"tried again: {cause.value}", count)
        nursery.cancel_scope.cancel()
    if sorted(got) != sorted(prompt.id for prompt in prompts(COUNT)):
        raise AssertionError(f"delivered were {sorted(got)}")
    if world.net.connections:
        raise AssertionError(f"still open: {world.net}")
