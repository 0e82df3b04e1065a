"""A trainer whose machine loses its power at any moment, again and again, until all its work is done (P7, P11)."""

from collections import Counter

import attrs
import trio

from trio_rollout import EngineSettings, IterableSource, Prompt, SamplingParams, SingleTurn, Trajectory
from trio_rollout._core.events import Event, SampleFinished
from trio_rollout._core.values import GroupId
from trio_rollout.abc import Rollout
from trio_rollout.testing import FakeServers, Say, SimWorld, prompts

COUNT = 10
SETTINGS = EngineSettings(samples_per_prompt=3, max_running=9)
WRITTEN_S = 0.5
"""Seconds after which a finished sample is on disk: it waits 0.2 s for others, and a write takes some milliseconds."""


@attrs.define
class Diary:
    """The trainer's knowledge that survives every crash."""

    acked: Counter[str] = attrs.field(factory=Counter)
    """Groups whose ack has returned."""
    delivered: Counter[str] = attrs.field(factory=Counter)
    samples: dict[tuple[GroupId, int], float] = attrs.field(factory=dict)
    """Samples that are finished, and when."""
    on_disk: set[tuple[GroupId, int]] = attrs.field(factory=set)
    """Samples that were finished long enough before a cut to be on disk."""
    again: list[tuple[GroupId, int]] = attrs.field(factory=list)
    """Those of them that were sampled again."""
    finished: bool = False
    power: bool = True
    """False after a power cut: code that still unwinds has no effect."""

    def event(self, event: Event) -> None:
        """Note a finished sample."""
        if isinstance(event, SampleFinished) and self.power:
            self.samples[event.id, event.trajectory.index] = trio.current_time()

    async def generate(self, prompt: Prompt, rollout: Rollout) -> Trajectory:
        """One turn; note one that is paid for twice."""
        if self.power and (prompt.group_id, rollout.index) in self.on_disk:
            self.again.append((prompt.group_id, rollout.index))
        return await SingleTurn(SamplingParams(max_new_tokens=8))(prompt, rollout)

    def cut(self) -> None:
        """Note a power cut."""
        self.power = False
        now = trio.current_time()
        self.on_disk |= {sample for sample, then in self.samples.items() if then < now - WRITTEN_S}
        self.samples.clear()


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
            groups = Counter(group.prompt for group, _ in diary.on_disk)
            world.sometimes(
                "cut with finished siblings on disk",
                any(
                    count < SETTINGS.samples_per_prompt and group not in diary.delivered
                    for group, count in groups.items()
                ),
            )
    return diary


async def end(world: SimWorld, diary: Diary, life: trio.CancelScope, seconds: float) -> None:
    """Cut the power first: writes of the cancelled engine while it unwinds do not count."""
    await trio.sleep(seconds)
    world.cut_power()
    diary.cut()
    life.cancel()


async def live(world: SimWorld, diary: Diary) -> None:
    """One life of engine, ledger and trainer."""
    servers = FakeServers(plan=lambda *_: Say(seconds=world.rng.uniform(0.1, 4.0)), ports=world.ports)
    async with (
        world.open_ledger() as ledger,
        world.open_engine(
            IterableSource(prompts(COUNT)),
            diary.generate,
            servers=servers,
            reward=reward,
            ledger=ledger,
            settings=SETTINGS,
            instruments=[diary],
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
    """Check that every group was acked once, none was lost, and no sample that was on disk was sampled again."""
    assert diary.again == []
    assert diary.acked == Counter(prompt.id for prompt in prompts(COUNT))
