"""The recipe of docs/restarts.md, killed at every point: each group is trained exactly once, and each version's number is used once.

A kill is the disk, the checkpoint and the servers as they are between two steps. Everything else of the process is gone.
"""

import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import trio

from trio_rollout import (
    Discard,
    EngineSettings,
    Pace,
    PauseMode,
    Retry,
    SamplingParams,
    SingleTurn,
    Staleness,
    open_ledger,
    open_rollout_engine,
)
from trio_rollout.sources import IterableSource
from trio_rollout.testing import FakeServers, Say, prompts, sim_run
from trio_rollout.testing._sim.disk import SimDisk
from trio_rollout.testing._sim.files import SimFiles
from trio_rollout.testing._sim.world import SimIO

COUNT = 12
(BLOCK,) = (
    block
    for block in re.findall(
        r"```python\n(.*?)```",
        (Path(__file__).parents[2] / "docs" / "restarts.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    if "checkpoint.save" in block
)


async def run_sync(call, *args):
    """Call it in place: a real thread would make the virtual clock run away."""
    await trio.lowlevel.checkpoint()
    return call(*args)


@attrs.frozen
class Kill:
    """What is left of a life that ended between two steps."""

    disk: int
    """The length of the disk's log."""
    step: int
    trained: tuple[str, ...]
    version: int
    paused: PauseMode | None
    pushed: tuple[int, ...]
    """Every version that weights were pushed under."""


@attrs.define
class Life:
    """A trainer with its checkpoint, its servers and its disk, from one start to its end. The recipe's names are its methods."""

    disk: SimDisk
    servers: FakeServers
    step: int = -1
    trained: list[str] = attrs.field(factory=list)
    since: list[str] = attrs.field(factory=list)
    pushed: list[int] = attrs.field(factory=list)
    before: list = attrs.field(factory=list)
    """What earlier lives did to the disk."""
    kills: list[Kill] = attrs.field(factory=list)

    def train_step(self, groups):
        self.since += [group.prompt.id for group in groups]

    def push_weights(self, version):
        assert version not in self.pushed, "two weights of one number"
        self.pushed.append(version)
        self.servers.set_version(version)

    def save(self, *, step):
        self.step = step
        self.trained += self.since
        self.since.clear()

    def after_task_step(self, _task):
        """Note the kill that could come now, if it differs from the last."""
        now = Kill(
            len(self.disk.log),
            self.step,
            tuple(self.trained),
            self.servers.version,
            self.servers.paused,
            tuple(self.pushed),
        )
        if not self.kills or self.kills[-1] != now:
            self.kills.append(now)

    def after(self, kill):
        """The next life, on what the kill has left."""
        files, done = SimFiles(), [*self.before, *self.disk.log[: kill.disk]]
        for op in done:
            files.apply(op)
        disk = SimDisk()
        disk.files = files
        servers = FakeServers(plan=self.servers.plan, version=kill.version)
        servers.paused = kill.paused
        return Life(disk, servers, kill.step, list(kill.trained), [], list(kill.pushed), done)

    def all_kills(self):
        """Those between two steps, and for each that changed the disk one in the middle of its writes."""
        for one, other in pairwise(self.kills):
            yield one
            if other.disk - one.disk > 1:
                yield attrs.evolve(one, disk=(one.disk + other.disk) // 2)
        yield self.kills[-1]


class Watch(trio.abc.Instrument):
    def __init__(self, life):
        self.after_task_step = life.after_task_step


@attrs.frozen
class Variant:
    """How a trainer goes about it; ``sizes`` are the batch sizes of its lives in turn."""

    sizes: tuple[int, ...] = (3,)
    mode: PauseMode = PauseMode.ABORT
    staleness: Staleness = attrs.field(factory=Staleness)
    late: bool = False
    """It writes a checkpoint, and acks, every second batch."""
    wait: bool = True

    def recipe(self, number, life):
        size = self.sizes[number % len(self.sizes)]
        if self.late:
            return self._late(size, life)
        text = BLOCK.replace("32", str(size)).replace(
            "weight_update()", f"weight_update(mode=PauseMode.{self.mode.name})"
        )
        names = {
            "trio": SimpleNamespace(to_thread=SimpleNamespace(run_sync=run_sync)),
            "PauseMode": PauseMode,
            "train_step": life.train_step,
            "push_weights": life.push_weights,
        }
        exec(compile(text, "docs/restarts.md", "exec"), names)
        return names["train"]

    def _late(self, size, life):
        async def train(engine, checkpoint):
            await engine.restore(checkpoint.step)
            async with engine.weight_update(mode=self.mode) as window:
                life.push_weights(window.version)
            out = []
            async for batch in engine.batches(size):
                life.train_step(batch.groups)
                out.append(batch)
                if batch.step % 2:
                    async with engine.weight_update(mode=self.mode) as window:
                        life.push_weights(window.version)
                    checkpoint.save(step=batch.step)
                    while out:
                        await out.pop(0).ack()
            checkpoint.save(step=batch.step if out else checkpoint.step)

        return train


async def live(life, variant, number):
    """One life, to the end of the data."""
    settings = EngineSettings(
        samples_per_prompt=2,
        max_running=6,
        max_ready=4,
        retry=Retry(backoff_base=0.01, backoff_max=0.1),
        staleness=variant.staleness,
        wait_for_weights=variant.wait and not variant.late,
    )
    async with (
        open_ledger("sim", disk=life.disk, io=SimIO()) as ledger,
        open_rollout_engine(
            IterableSource(prompts(COUNT)),
            SingleTurn(SamplingParams(max_new_tokens=4)),
            servers=life.servers,
            ledger=ledger,
            settings=settings,
        ) as engine,
    ):
        await variant.recipe(number, life)(engine, life)


def run(life, variant, number, seed, *, watched=True):
    sim_run(lambda: live(life, variant, number), seed=seed, instruments=[Watch(life)] if watched else [])


ALL = sorted(prompt.id for prompt in prompts(COUNT))
VARIANTS = {
    "as written": Variant(),
    "other batch sizes": Variant(sizes=(4, 3, 5)),
    "pace 0": Variant(staleness=Staleness(max_versions=0), sizes=(3, 2)),
    "pace 1, retract": Variant(
        staleness=Staleness(max_versions=1, policy=Pace()), mode=PauseMode.RETRACT, sizes=(2, 3)
    ),
    "discard, in place": Variant(staleness=Staleness(max_versions=0, policy=Discard()), mode=PauseMode.IN_PLACE),
    "discard, abort": Variant(staleness=Staleness(max_versions=1, policy=Discard()), sizes=(4, 1)),
    "every second batch": Variant(late=True, sizes=(2, 3), mode=PauseMode.RETRACT),
    "servers of any weights": Variant(wait=False, sizes=(5, 2)),
}


def plan(number, _):
    return Say(seconds=1 + number % 3)


@pytest.mark.parametrize("name", VARIANTS)
def test_f140_killed_at_any_point_each_group_is_trained_once(name):
    variant, seed = VARIANTS[name], f"recipe {name}"
    first = Life(SimDisk(), FakeServers(plan=plan))
    run(first, variant, 0, seed)
    assert sorted(first.trained) == ALL
    kills = list(first.all_kills())
    assert len(kills) > 50
    again = 0
    for number, kill in enumerate(kills):
        second = first.after(kill)
        run(second, variant, 1, f"{seed} {number}", watched=number % 3 == 0)
        assert sorted(second.trained) == ALL, f"killed at {number}: {kill}"
        if second.kills:  # killed again, at another point
            other = second.kills[(number * 7919) % len(second.kills)]
            third = second.after(other)
            again += 1
            run(third, variant, 2, f"{seed} {number} again", watched=False)
            assert sorted(third.trained) == ALL, f"killed at {number}, {kill}, and then, {other}"
    assert again
