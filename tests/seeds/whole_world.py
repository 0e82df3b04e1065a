"""A whole engine drawn from a seed: 20 groups of 4, two servers, three faults, weight updates, a slow consumer, and more."""

from contextlib import AsyncExitStack
from functools import partial

import attrs
import trio

from trio_rollout import (
    Deadlines,
    Discard,
    Drop,
    EngineSettings,
    Group,
    IterableSource,
    Keep,
    Pace,
    PauseMode,
    Prompt,
    Resume,
    Retry,
    RolloutEngine,
    SamplingParams,
    Staleness,
    Trajectory,
)
from trio_rollout.abc import Rollout
from trio_rollout.errors import EndOfData, EngineClosed, RolloutError, ServerError
from trio_rollout.testing import FakeSGLang, SimWorld, disturb, is_conserved, prompts

from .faults import ALL, Faulty

COUNT = 20
TROUBLED_S = 60.0
"""Virtual seconds for which faults strike; a world that is never quiet proves nothing more, and takes for ever."""
WINDOWS = 4
SAMPLING = SamplingParams(max_new_tokens=8)
LEAVES_WITHIN_S = 60.0
"""Virtual seconds after which nothing may run on any server: a client that left is noticed after 3 s."""


class Noting(IterableSource):
    """A source that takes a moment and notes what came back."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(prompts(count))
        self.count = count
        self.returned: list[str] = []

    async def take(self, count: int) -> list[Prompt]:
        await trio.sleep(0.1)
        return await super().take(count)

    async def give_back(self, prompts: list[Prompt]) -> None:
        self.returned += [prompt.id for prompt in prompts]
        await super().give_back(prompts)


@attrs.define(eq=False)
class Story:
    """The events of a run, and the groups that they happened to."""

    source: Noting = attrs.field(factory=Noting)
    delivered: list[str] = attrs.field(factory=list)
    ended_early: bool = False
    has_ledger: bool = False
    failed: BaseException | None = None

    def check(self, engine: RolloutEngine) -> None:
        """Each prompt that was pulled ended once, in one place."""
        now = engine.statistics()
        quarantined = [report.id.prompt for report in engine.quarantined()]
        ended = [*self.delivered, *quarantined, *self.source.returned]
        assert len(set(ended)) == len(ended), f"ended twice: {sorted(ended)}"
        assert is_conserved(now), now
        assert (now.running, now.running_rollouts) == (0, 0), now
        if not self.has_ledger:
            assert len(ended) + now.filtered == now.pulled, (now, sorted(ended))
        if not self.ended_early and self.failed is None:
            assert len(self.delivered) + len(quarantined) + now.filtered == self.source.count, (now, sorted(ended))


def draw_settings(world: SimWorld) -> EngineSettings:
    """Everything that a user might set, small enough to be reached."""
    rng = world.rng
    staleness = rng.choice([None, None, Pace(), Discard(max_recycles=3)])
    group, rollout = rng.choice([(None, 60.0), (40.0, None), (120.0, None), (120.0, 60.0)])  # user code may hang
    return EngineSettings(
        samples_per_prompt=4,
        max_running=rng.choice([8, 16, 32]),
        max_ready=rng.choice([1, 2, 8]),
        partial=rng.random() < 0.4,
        resume=Resume.TURNS if world.seed % 4 == 2 else Resume.SAMPLES,
        deadlines=Deadlines(
            group=group,
            rollout=rollout,
            turn=rng.choice([15.0, 30.0]),
            no_progress=rng.choice([None, 10.0]),
            reward=5.0,
            abort=2.0,
            control=8.0,
            drain=20.0,
        ),
        retry=Retry(max_attempts=rng.choice([2, 30]), max_free=200, backoff_base=0.1, backoff_max=2.0),
        staleness=Staleness() if staleness is None else Staleness(max_versions=rng.randint(0, 2), policy=staleness),
        failure_budget=rng.choice([5, 1000]),
    )


async def whole(world: SimWorld) -> None:
    """The story of one seed, checked at every step and at its end."""
    rng, story = world.rng, Story()
    faults = Faulty(world, rng.sample(ALL, 3), rate=rng.choice([0.05, 0.2, 0.5]))
    async with trio.open_nursery() as nursery:
        for number in range(2):
            url = f"http://s{number}:1"
            fake = faults.fakes[url] = FakeSGLang(incremental=bool(rng.getrandbits(1)), drip_s=0.001)
            fake.plan = faults.plan(url, nursery)
            world.net.add_host(url, fake.serve, restarted=partial(_restart, fake, forgets=number == 0))
        await _serve(world, story, faults)
        await _require_idle(world, faults)
        nursery.cancel_scope.cancel()
    if world.net.connections:
        raise AssertionError(f"still open: {world.net}")


def _restart(fake: FakeSGLang, *, forgets: bool) -> None:
    """A new process: no requests, no pause. One that ``forgets`` has the weights it was first started with."""
    fake.kill()
    if forgets:
        fake.version = "default"


async def _serve(world: SimWorld, story: Story, faults: Faulty) -> None:
    rng = world.rng
    faults.active = False
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(world.open_servers(faults.fakes))
        story.has_ledger = rng.random() < 0.3
        ledger = await stack.enter_async_context(world.open_ledger()) if story.has_ledger else None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_trouble, world, faults)
            outer = trio.CancelScope(deadline=trio.current_time() + rng.choice([1e9] * 6 + [rng.uniform(1, 40)]))
            engine = None
            with outer:
                async with world.open_engine(
                    story.source,
                    partial(_generate, faults),
                    servers=servers,
                    reward=partial(_reward, faults),
                    group_filter=partial(_filter, world),
                    ledger=ledger,
                    settings=draw_settings(world),
                ) as engine:
                    await _live(world, engine, story, faults)
            story.ended_early |= outer.cancelled_caught
            world.sometimes("cancelled from outside", outer.cancelled_caught)
            nursery.cancel_scope.cancel()
        if engine is not None:
            _note(world, engine)
            story.check(engine)


async def _trouble(world: SimWorld, faults: Faulty) -> None:
    """Let faults strike for a while; then everything is up and connected again."""
    faults.active = True
    with trio.move_on_after(TROUBLED_S):
        if faults.troubles:
            await disturb(world.net, rng=world.rng, every=(3, 20), outage=(1, 15), kinds=faults.troubles)
        await trio.sleep_forever()
    _mend(world, faults)


def _mend(world: SimWorld, faults: Faulty) -> None:
    faults.active = False
    for host in world.net.hosts:
        if host.cut_off and host.up:
            host.mend()
        if not host.up:
            host.start()


async def _generate(faults: Faulty, prompt: Prompt, rollout: Rollout) -> Trajectory:
    turns = []
    for _ in range(1 + rollout.index % 2):
        await faults.user("generate")
        faults.world.sometimes("turns were given back", rollout.replaying)
        turns.append(await rollout.generate(rollout.input, SAMPLING))
        faults.world.sometimes(
            "a turn was put together from parts", len({span.version for span in turns[-1].versions}) > 1
        )
    return rollout.finish(turns)


async def _reward(faults: Faulty, trajectory: Trajectory) -> float:
    await trio.sleep(faults.world.rng.uniform(0, 1))
    await faults.user("reward")
    return faults.world.rng.random()


async def _filter(world: SimWorld, group: Group) -> Keep | Drop:
    await trio.lowlevel.checkpoint()
    return Drop("drawn") if world.rng.random() < 0.1 else Keep()


async def _live(world: SimWorld, engine: RolloutEngine, story: Story, faults: Faulty) -> None:
    """Consume to the end beside weight updates, perhaps an evaluation, perhaps a drain."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_update, world, engine, story, faults)
        if world.rng.random() < 0.3:
            nursery.start_soon(_evaluate, world, engine, story)
        if world.rng.random() < 0.2:
            nursery.start_soon(_drain, world, engine, story)
        await _consume(world, engine, story, faults)
        nursery.cancel_scope.cancel()


async def _consume(world: SimWorld, engine: RolloutEngine, story: Story, faults: Faulty) -> None:
    rng = world.rng
    slow_from = trio.current_time() + rng.uniform(0, 20)
    while True:
        if slow_from < trio.current_time() < slow_from + 30:
            world.sometimes("slow consumer")
            await trio.sleep(rng.uniform(2, 10))
            world.sometimes("full buffer", engine.statistics().ready >= 8)
        batch = None
        with trio.move_on_after(rng.choice([1.0, 1e9])) as patience:
            try:
                batch = await engine.next_batch(rng.randint(1, 4))
            except (EndOfData, EngineClosed):
                return
            except ServerError:  # all that answer have old weights: only its consumer can end that
                world.sometimes("only a weight update helps")
                await _window(world, engine, faults)
            except RolloutError as error:
                world.sometimes("failure budget", "failure_budget" in str(error))
                story.failed = error
                return
        world.sometimes("next_batch was cancelled", patience.cancelled_caught)
        if batch is not None:
            story.delivered += [group.prompt.id for group in batch.groups]
            for group in batch.groups:
                assert [row.index for row in group.trajectories] == [0, 1, 2, 3], group
            try:
                await batch.ack()
            except RolloutError as error:
                story.failed = error
                return


async def _update(world: SimWorld, engine: RolloutEngine, story: Story, faults: Faulty) -> None:
    """A few windows, and more for as long as one fails."""
    done = 0
    while done < WINDOWS:
        await trio.sleep(world.rng.uniform(2, 15))
        try:
            done += await _window(world, engine, faults)
        except RolloutError as error:  # the engine's own failure is told by whatever call comes first
            story.failed = error
            return


async def _window(world: SimWorld, engine: RolloutEngine, faults: Faulty) -> bool:
    """One window, if no other is open; whether it brought the servers to a new version."""
    rng = world.rng
    version, mode = engine.weight_version + 1, rng.choice(list(PauseMode))
    try:
        async with engine.weight_update(version=version, mode=mode):
            for fake in faults.fakes.values():
                fake.version = str(version)
            await trio.sleep(rng.uniform(0, 3))
    except ServerError:
        world.sometimes("window failed")
        return False
    except trio.BusyResourceError:
        await trio.sleep(1)
        return False
    world.sometimes(f"window: {mode.value}")
    return True


async def _evaluate(world: SimWorld, engine: RolloutEngine, story: Story) -> None:
    await trio.sleep(world.rng.uniform(0, 10))
    try:
        groups = await engine.evaluate(IterableSource(prompts(2, prefix="e")))
    except RolloutError as error:
        story.failed = error
        return
    assert [group.prompt.id for group in groups] == ["e0", "e1"]
    world.sometimes("evaluated")


async def _drain(world: SimWorld, engine: RolloutEngine, story: Story) -> None:
    await trio.sleep(world.rng.uniform(1, 30))
    story.ended_early = True
    began = trio.current_time()
    await engine.drain(grace=world.rng.uniform(0, 5))
    world.sometimes("drained")
    assert trio.current_time() - began <= 20 + 5, "a drain has its limit"


def _note(world: SimWorld, engine: RolloutEngine) -> None:
    """Note the states that the engine's own counts show."""
    now = engine.statistics()
    for cause, count in now.requeues.items():
        world.sometimes(f"requeued: {cause.value}", count)
    for cause, count in now.retries.items():
        world.sometimes(f"tried again: {cause.value}", count)
    world.sometimes("late answer", now.late)
    world.sometimes("orphan", now.orphans)
    world.sometimes("quarantined", now.quarantined)
    world.sometimes("filtered", now.filtered)
    world.sometimes("returned", now.returned)


async def _require_idle(world: SimWorld, faults: Faulty) -> None:
    """Once everything is up and connected again nothing of the engine's runs anywhere."""
    _mend(world, faults)
    for fake in faults.fakes.values():
        fake.resume()
        with trio.move_on_after(LEAVES_WITHIN_S):
            await fake.until(lambda fake=fake: not fake.in_flight)
        if fake.in_flight:
            raise AssertionError(f"left running: {fake}")
