"""A trainer whose machine loses its power at any moment, again and again, until all its work is done (P7, P11)."""

from collections import Counter
from collections.abc import Sequence

import attrs
import trio

from trio_rollout import EngineSettings, IterableSource, Prompt, Resume, Retry, SamplingParams, Trajectory
from trio_rollout._core.events import Event, SampleFinished
from trio_rollout.abc import Rollout
from trio_rollout.errors import SandboxLost, ServerLost
from trio_rollout.testing import Fail, FakeServers, Say, SimWorld

COUNT, SAMPLES, TURNS = 10, 3, 2
PROMPTS = [Prompt(id=str(number), input_ids=[number]) for number in range(COUNT)]
SETTINGS = EngineSettings(
    samples_per_prompt=SAMPLES, max_running=9, retry=Retry(max_attempts=100, backoff_base=0.1, backoff_max=0.5)
)
WRITTEN_S = 0.5
"""Seconds after which a finished sample is on disk: it waits 0.2 s for others, and a write takes some milliseconds."""


@attrs.define(eq=False)
class Diary:
    """The trainer's knowledge that survives every crash. A sample is (group, index), a turn (group, index, number)."""

    world: SimWorld
    acked: Counter[str] = attrs.field(factory=Counter)
    """Groups whose ack has returned."""
    delivered: Counter[str] = attrs.field(factory=Counter)
    paid: dict[tuple[int, ...], float] = attrs.field(factory=dict)
    """Samples and turns that were finished in this life, and when."""
    on_disk: set[tuple[int, ...]] = attrs.field(factory=set)
    """Those that were finished long enough before a cut."""
    again: list[tuple[int, ...]] = attrs.field(factory=list)
    """Turns that were sampled although they, or their samples, were on disk."""
    finished: bool = False
    power: bool = True
    """False after a power cut: code that still unwinds has no effect."""

    @property
    def settings(self) -> EngineSettings:
        """In every other world turns come back."""
        return attrs.evolve(SETTINGS, resume=Resume.TURNS if self.world.seed % 2 else Resume.SAMPLES)

    def event(self, event: Event) -> None:
        """Note a finished sample."""
        if isinstance(event, SampleFinished):
            self.note(int(event.id.prompt), event.trajectory.index)

    def note(self, *paid: int) -> None:
        """Note a finished sample or turn."""
        if self.power:
            self.paid.setdefault(paid, trio.current_time())

    async def generate(self, prompt: Prompt, rollout: Rollout) -> Trajectory:
        """Two turns, whose prompts say which they are."""
        turns = []
        for number in range(TURNS):
            turn = int(prompt.id), rollout.index, number
            turns.append(await rollout.generate(turn, SamplingParams(max_new_tokens=8)))
            self.note(*turn)
        return rollout.finish(turns)

    def served(self, _: int, turn: Sequence[int]) -> Say | Fail:
        """Return what the server does; note a turn that is paid for twice. Failures are never those of user code."""
        rng, turn = self.world.rng, tuple(turn)
        comes_back = self.settings.resume is Resume.TURNS and (turn in self.on_disk or turn in self.paid)
        if self.power and (comes_back or turn[:2] in self.on_disk or turn[:2] in self.paid):
            self.again.append(turn)
        seconds = rng.uniform(0.1, 2.0)
        return Fail(ServerLost("drawn"), seconds) if rng.random() < 0.1 else Say(seconds=seconds)

    async def reward(self, _: Trajectory) -> float:
        """A reward that takes a moment, and fails now and then."""
        await trio.sleep(0.5)
        if self.world.rng.random() < 0.1:
            raise SandboxLost("drawn")
        return 1.0

    def cut(self) -> None:
        """Note a power cut."""
        self.power = False
        now = trio.current_time()
        self.on_disk |= {paid for paid, then in self.paid.items() if then < now - WRITTEN_S}
        self.paid.clear()


async def crashing(world: SimWorld) -> Diary:
    """Run lives until the data ends; each life except the last ends by a power cut."""
    diary = Diary(world)
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
            finished = Counter(str(paid[0]) for paid in diary.on_disk if len(paid) == 2)
            siblings = [group for group, count in finished.items() if count < SAMPLES and group not in diary.delivered]
            world.sometimes("cut with finished siblings on disk", siblings)
            turns = [paid for paid in diary.on_disk if len(paid) == 3 and paid[:2] not in diary.on_disk]
            world.sometimes("cut with turns on disk", turns and diary.settings.resume is Resume.TURNS)
    return diary


async def end(world: SimWorld, diary: Diary, life: trio.CancelScope, seconds: float) -> None:
    """Cut the power first: writes of the cancelled engine while it unwinds do not count."""
    await trio.sleep(seconds)
    world.cut_power()
    diary.cut()
    life.cancel()


async def live(world: SimWorld, diary: Diary) -> None:
    """One life of engine, ledger and trainer."""
    servers = FakeServers(plan=diary.served, ports=world.ports)
    async with (
        world.open_ledger() as ledger,
        world.open_engine(
            IterableSource(PROMPTS),
            diary.generate,
            servers=servers,
            reward=diary.reward,
            ledger=ledger,
            settings=diary.settings,
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
    """Check that every group was acked once, none was lost, and nothing that was on disk was sampled again."""
    assert diary.again == []
    assert diary.acked == Counter(prompt.id for prompt in PROMPTS)
