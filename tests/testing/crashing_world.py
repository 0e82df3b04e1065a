"""A trainer whose machine loses its power at any moment, again and again, until all its work is done (P7)."""

from collections import Counter

import attrs
import trio

from trio_rollout import EngineSettings, IterableSource, SamplingParams, SingleTurn, Trajectory
from trio_rollout.testing import FakeServers, Say, SimWorld, prompts

COUNT = 10
SETTINGS = EngineSettings(samples_per_prompt=2, max_running=8)


@attrs.define
class Diary:
    """The trainer's knowledge that survives every crash."""

    acked: Counter[str] = attrs.field(factory=Counter)
    """Groups whose ack has returned."""
    delivered: Counter[str] = attrs.field(factory=Counter)
    finished: bool = False
    power: bool = True
    """False after a power cut: code that still unwinds has no effect."""


async def reward(_: Trajectory) -> float:
    """A reward that takes a moment."""
    await trio.sleep(0.5)
    return 1.0


async def crashing(world: SimWorld) -> Diary:
    """Run lives until the data ends; each life except the last ends by a power cut."""
    diary = Diary()
    while not diary.finished:
        diary.power = True
        with trio.CancelScope() as life:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end, world, diary, life, world.rng.uniform(0.01, 8.0))
                await live(world, diary)
                nursery.cancel_scope.cancel()
        if not diary.finished:
            world.sometimes("cut with something acked", diary.acked)
            world.sometimes("cut with something delivered and not acked", diary.delivered.keys() - diary.acked.keys())
    return diary


async def end(world: SimWorld, diary: Diary, life: trio.CancelScope, seconds: float) -> None:
    """Cut the power first: writes of the cancelled engine while it unwinds do not count."""
    await trio.sleep(seconds)
    world.cut_power()
    diary.power = False
    life.cancel()


async def live(world: SimWorld, diary: Diary) -> None:
    """One life of engine, ledger and trainer."""
    servers = FakeServers(plan=lambda *_: Say(seconds=world.rng.uniform(0.1, 4.0)), ports=world.ports)
    async with (
        world.open_ledger() as ledger,
        world.open_engine(
            IterableSource(prompts(COUNT)),
            SingleTurn(SamplingParams(max_new_tokens=8)),
            servers=servers,
            reward=reward,
            ledger=ledger,
            settings=SETTINGS,
        ) as engine,
    ):
        async for batch in engine.batches(2):
            ids = [group.prompt.id for group in batch.groups]
            if again := diary.acked.keys() & set(ids):
                raise AssertionError(f"delivered after their ack had returned: {sorted(again)}")
            diary.delivered.update(ids)
            await trio.sleep(world.rng.uniform(0, 3))
            await batch.ack()
            if diary.power:  # an ack that the ledger accepted returns even if it is cancelled
                diary.acked.update(ids)
        diary.finished = diary.power


def check(diary: Diary) -> None:
    """Check that every group was acked once and none was lost."""
    assert diary.acked == Counter(prompt.id for prompt in prompts(COUNT))
