"""A small whole system for tests of SimWorld: engine, client, two fake servers, ledger. As a script: its digest."""

import sys

import trio

from trio_rollout import (
    Deadlines,
    EngineSettings,
    EngineStatistics,
    IterableSource,
    Retry,
    SamplingParams,
    SingleTurn,
    Trajectory,
)
from trio_rollout.errors import ServerError
from trio_rollout.testing import FakeSGLang, NetFaults, SimWorld, prompts

COUNT = 6
FAULTS = NetFaults(refused=0.1, unanswered=0.05, reset=0.2, silent=0.05)


async def small(world: SimWorld, *, faults: NetFaults = NetFaults()) -> EngineStatistics:  # noqa: B008
    """Check that every prompt is delivered once and acked, with a weight update after each batch, and nothing is left."""
    fakes = {f"http://s{number}:1": FakeSGLang() for number in range(2)}
    for url, fake in fakes.items():
        world.net.add_host(url, fake.serve)

    async def reward(_: Trajectory) -> float:
        await trio.sleep(world.rng.random())
        return world.rng.random()

    settings = EngineSettings(
        samples_per_prompt=2,
        max_running=8,
        deadlines=Deadlines(turn=20),
        retry=Retry(max_attempts=50, backoff_base=0.1),
        failure_budget=100,
    )
    got: list[str] = []
    async with world.open_servers(fakes) as servers, world.open_ledger() as ledger:
        world.net.faults = faults
        async with world.open_engine(
            IterableSource(prompts(COUNT)),
            SingleTurn(SamplingParams(max_new_tokens=8)),
            servers=servers,
            reward=reward,
            ledger=ledger,
            settings=settings,
        ) as engine:
            async for batch in engine.batches(2):
                got += [group.prompt.id for group in batch.groups]
                await update(engine, fakes, world, batch.step + 1)
                await batch.ack()
        world.sometimes("tried again", sum(engine.statistics().retries.values()))
    if sorted(got) != sorted(prompt.id for prompt in prompts(COUNT)):
        raise AssertionError(f"delivered were {sorted(got)}")
    if left := world.net.connections:
        raise AssertionError(f"{left} connections are still open")
    return engine.statistics()


async def update(engine, fakes, world: SimWorld, version: int) -> None:
    """Give every server new weights; a window may fail."""
    try:
        async with engine.weight_update(version=version):
            for fake in fakes.values():
                fake.version = str(version)
    except ServerError:
        world.sometimes("a server could not be paused or named the old version")


def digest(seed: int) -> str:
    """Return the digest of one run with faults."""
    return SimWorld(seed=seed).run(faulty).digest


async def faulty(world: SimWorld) -> EngineStatistics:
    """Run ``small`` under faults."""
    return await small(world, faults=FAULTS)


if __name__ == "__main__":
    sys.stdout.write(digest(1))
