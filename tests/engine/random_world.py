"""A whole engine drawn from a seed: faults, windows, a slow consumer, filters, drains; checked between any two steps."""

import random

import attrs
import trio

from trio_rollout import (
    Cause,
    Deadlines,
    Drop,
    EngineSettings,
    Keep,
    PauseMode,
    Ports,
    Resume,
    Retry,
    SamplingParams,
    SingleTurn,
    open_rollout_engine,
)
from trio_rollout._core.events import SampleFinished
from trio_rollout.errors import EndOfData, EngineClosed, RolloutError, SandboxLost, ServerLost
from trio_rollout.sources import IterableSource
from trio_rollout.testing import HANG, Fail, FakeServers, Say, is_conserved, prompts
from trio_rollout.testing._sim.conservation import Conservation

FAULTS = {
    "lost": lambda rng: Fail(ServerLost("reset"), rng.uniform(0, 3)),
    "sandbox": lambda rng: Fail(SandboxLost("gone"), rng.uniform(0, 3)),
    "error": lambda rng: Fail(ValueError("broken"), rng.uniform(0, 3)),
    "hang": lambda rng: HANG,
}


@attrs.define
class Finished:
    """An instrument that notes the samples that are finished, and those of them that are sampled again.

    ``turns`` are those of each sample; ``given_back`` counts the recorded ones.
    """

    turns: int = 1
    samples: set = attrs.field(factory=set)
    again: list = attrs.field(factory=list)
    given_back: int = 0

    def event(self, event):
        if isinstance(event, SampleFinished):
            self.samples.add((event.id, event.trajectory.index))

    async def generate(self, prompt, rollout):
        if (prompt.group_id, rollout.index) in self.samples:
            self.again.append((prompt.id, rollout.index))
        if self.turns == 1:
            return await SingleTurn(SamplingParams(max_new_tokens=8))(prompt, rollout)
        turns, ids = [], list(rollout.input)
        for _ in range(self.turns):
            self.given_back += rollout.replaying
            turns.append(await rollout.generate(ids, SamplingParams(max_new_tokens=8)))
            ids = [*turns[-1].prompt_ids, *turns[-1].output_ids, 9]
        return rollout.finish(turns)


@attrs.define
class Story:
    """The story of a run: the ids that came out, and where, and the last counts."""

    count: int
    delivered: list = attrs.field(factory=list)
    returned: list = attrs.field(factory=list)
    counts: object = None
    causes: set = attrs.field(factory=set)
    quarantined: list = attrs.field(factory=list)
    finished: Finished = attrs.field(factory=Finished)
    failed: bool = False
    drained: bool = False

    def check(self):
        """Check that each pulled prompt ended once, in one place, and that no finished sample was sampled again."""
        assert self.finished.again == []
        assert len(set(self.delivered)) == len(self.delivered)
        settled = self.delivered + self.quarantined
        assert len(set(settled)) == len(settled)
        assert not set(settled) & set(self.returned)
        now = self.counts
        assert is_conserved(now)
        assert (now.running, now.running_rollouts) == (0, 0)
        if not self.failed and not self.drained:
            assert len(settled) + now.filtered == self.count


class Noting:
    """A source that notes the prompts that came back."""

    def __init__(self, count, story):
        self.inner, self.story = IterableSource(prompts(count)), story

    async def take(self, count):
        await trio.sleep(0.1)
        return await self.inner.take(count)

    async def give_back(self, prompts):
        self.story.returned.extend(prompt.id for prompt in prompts)

    def state(self):
        return {}


def draw_settings(rng, seed):
    return EngineSettings(
        samples_per_prompt=rng.randint(1, 4),
        max_running=rng.randint(4, 12),
        max_ready=rng.randint(1, 6),
        partial=rng.random() < 0.3,
        resume=Resume.TURNS if seed % 3 == 1 else Resume.SAMPLES,
        deadlines=Deadlines(group=rng.choice([None, 20.0, 60.0]), turn=rng.choice([8.0, 15.0]), drain=15.0),
        retry=Retry(max_attempts=rng.randint(2, 4), backoff_base=0.1, backoff_max=1.0),
        failure_budget=50,
    )


async def live(seed, invariants, *, count=20):
    """Run the world of this seed to its end and tell its story; conservation holds between any two steps."""
    rng = random.Random(seed)
    story, rate, slow = Story(count), rng.choice([0.0, 0.1, 0.3]), rng.random() < 0.5

    def plan(number, _):
        if rng.random() < rate:
            return FAULTS[rng.choice(list(FAULTS))](rng)
        return Say(tokens=rng.randint(1, 8), seconds=rng.lognormvariate(0, 1))

    async def reward(trajectory):
        await trio.sleep(rng.uniform(0, 1))
        if rng.random() < rate / 4:
            raise RuntimeError("judge")
        return rng.random()

    async def group_filter(group):
        return Drop("drawn") if rng.random() < 0.1 else Keep()

    settings = draw_settings(rng, seed)
    story.finished.turns = 3 if settings.resume is Resume.TURNS else 1
    servers, source = FakeServers(plan=plan, ports=Ports(random.Random(seed))), Noting(count, story)
    async with open_rollout_engine(
        source,
        story.finished.generate,
        servers=servers,
        reward=reward,
        group_filter=group_filter,
        settings=settings,
        ports=Ports(random.Random(seed)),
        instruments=[story.finished],
    ) as engine:
        with invariants.hold(Conservation(engine), "conservation"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_update, engine, servers, rng)
                if rng.random() < 0.3:
                    nursery.start_soon(_drain, engine, rng, story)
                await _consume(engine, rng, slow, story)
                nursery.cancel_scope.cancel()
    story.counts = engine.statistics()
    story.causes = {
        cause for counts in (story.counts.requeues, story.counts.retries) for cause, times in counts.items() if times
    }
    story.quarantined = [report.id.prompt for report in engine.quarantined()]
    assert servers.running == 0
    return story


async def _consume(engine, rng, slow, story):
    while True:
        if slow:
            await trio.sleep(rng.uniform(0, 10))
        with trio.move_on_after(rng.choice([1.0, 1e9])):
            try:
                batch = await engine.next_batch(rng.randint(1, 4))
            except (EndOfData, EngineClosed):
                return
            except RolloutError:
                story.failed = True
                return
            story.delivered.extend(group.prompt.id for group in batch.groups)
            with trio.CancelScope(shield=True):
                await batch.ack()


async def _update(engine, servers, rng):
    version = 0
    while True:
        await trio.sleep(rng.uniform(1, 10))
        version += 1
        async with engine.weight_update(version=version, mode=rng.choice(list(PauseMode))):
            await trio.sleep(rng.uniform(0, 2))
            servers.set_version(version)


async def _drain(engine, rng, story):
    await trio.sleep(rng.uniform(1, 20))
    story.drained = True
    await engine.drain(grace=rng.uniform(0, 5))


ALL_CAUSES = {Cause.DEADLINE, Cause.ERROR, Cause.INFRASTRUCTURE, Cause.SERVER_LOST, Cause.WEIGHT_UPDATE}
