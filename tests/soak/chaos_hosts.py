"""Asyncio functions that do everything wrong, for minutes: `python tests/soak/chaos_hosts.py --minutes 10`.

Every fifth rollout or so runs one of `OFFENDERS`; the rest are well behaved. Everything must be delivered exactly once, no slot may
be lost, and the bridge's report must name each offender with its misuse, and no other function. Exits with 1 if any of that fails.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import click
import psutil
import trio

from trio_rollout import Deadlines, EngineSettings, IterableSource, Prompt, Retry, RolloutEngine, open_rollout_engine
from trio_rollout.errors import EndOfData
from trio_rollout.testing import FakeServers, Say, is_conserved
from trio_rollout_compat import Bridge, BridgeSettings, asyncio_generate, asyncio_reward, open_bridge
from trio_rollout_compat.bridge import BridgeStatistics, Misuse

FAULTY = 0.2
BLOCKS_S = 0.5
DEAF_S = 6.0
BATCH = 8
MiB = 2**20
MORE_MIB = 8
"""Most growth of memory after a fifth of the run: this script remembers a fifth of a kilobyte for each delivered group."""


async def forever() -> None:
    """Wait for what never comes."""
    await asyncio.get_running_loop().create_future()


async def answer(rollout: Any) -> Any:
    """Do a rollout correctly."""
    return rollout.finish([await rollout.generate(rollout.input)])


async def well_behaved(prompt: Prompt, rollout: Any) -> Any:
    """Nothing wrong."""
    return await answer(rollout)


async def hangs(prompt: Prompt, rollout: Any) -> Any:
    """Never returns, but heeds its cancellation."""
    await forever()


async def swallows(prompt: Prompt, rollout: Any) -> Any:
    """Returns in spite of its cancellation."""
    with contextlib.suppress(asyncio.CancelledError):
        await forever()
    return None


async def is_deaf(prompt: Prompt, rollout: Any) -> Any:
    """Hears no cancellation for longer than anybody waits for it, and ends some time after that."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] | None = None
    while over is None or not over.done():
        try:
            await (forever() if over is None else asyncio.shield(over))
        except asyncio.CancelledError:
            if over is None:
                over = loop.create_future()
                loop.call_later(DEAF_S, over.set_result, None)


async def leaks(prompt: Prompt, rollout: Any) -> Any:
    """Leaves a task behind."""
    left = asyncio.create_task(forever())
    await asyncio.sleep(0)
    del left
    return await answer(rollout)


async def blocks(prompt: Prompt, rollout: Any) -> Any:
    """Keeps the loop to itself."""
    time.sleep(BLOCKS_S)  # ruff: ignore[blocking-sleep-in-async-function]  that is what it does wrong
    return await answer(rollout)


async def exits(prompt: Prompt, rollout: Any) -> Any:
    """Wants to end the process."""
    sys.exit(1)


async def crashes_behind(prompt: Prompt, rollout: Any) -> Any:
    """Leave a callback that raises on the loop."""
    asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    return await answer(rollout)


OFFENDERS = {
    swallows: Misuse.SWALLOWED,
    is_deaf: Misuse.ABANDONED,
    leaks: Misuse.LEAKED,
    blocks: Misuse.BLOCKED,
    exits: Misuse.EXITED,
    crashes_behind: Misuse.CRASHED,
}
# Blocking costs everybody else the time, so it is rare.
CHOICES = [*OFFENDERS, hangs] * 4
CHOICES = [fn for fn in CHOICES if fn is not blocks] + [blocks]


async def score(trajectory: Any) -> float:
    """An asyncio judge that behaves."""
    await asyncio.sleep(0)
    return 1.0


@attrs.define
class Run:
    """The calls that were made, and their results."""

    rng: random.Random
    until: float
    called: Counter[str] = attrs.field(factory=Counter)
    made: int = 0
    delivered: Counter[str] = attrs.field(factory=Counter)
    resident: list[int] = attrs.field(factory=list)
    """In MiB, after each batch."""

    def prompts(self) -> Iterator[Prompt]:
        """More and more, until the time is over."""
        for number in itertools.count():
            if time.monotonic() > self.until:
                return
            self.made += 1
            yield Prompt(id=str(number), text="say")

    def generate(self, bridge: Bridge) -> Any:
        """A generate function that is one of the functions above, chosen anew for each rollout."""
        wrapped = {fn: asyncio_generate(fn, bridge=bridge) for fn in {well_behaved, *CHOICES}}

        async def one_of_them(prompt: Prompt, rollout: Any) -> Any:
            fn = self.rng.choice(CHOICES) if self.rng.random() < FAULTY else well_behaved
            self.called[fn.__name__] += 1
            return await wrapped[fn](prompt, rollout)

        return one_of_them

    async def take_all(self, engine: RolloutEngine) -> None:
        """The trainer."""
        process, shown = psutil.Process(), time.monotonic()
        with contextlib.suppress(EndOfData):
            while True:
                batch = await engine.next_batch(BATCH)
                self.delivered.update(group.prompt.id for group in batch.groups)
                await batch.ack()
                self.resident.append(process.memory_info().rss // MiB)
                if time.monotonic() - shown > 60:
                    shown = time.monotonic()
                    click.echo(f"{len(self.delivered)} groups delivered, {self.resident[-1]} MiB")

    def complaints(self, report: BridgeStatistics, engine: RolloutEngine) -> Iterator[str]:
        """Return the conditions that do not hold."""
        now = engine.statistics()
        if set(self.delivered.values()) - {1} or len(self.delivered) != self.made:
            yield f"{self.made} groups made, {len(self.delivered)} delivered, {self.delivered.total()} times"
        if not is_conserved(now) or now.quarantined or now.acked != self.made:
            yield f"the counts are wrong: {now}"
        if now.running_rollouts or report.running:
            yield f"{now.running_rollouts} slots and {report.running} calls are still taken"
        if report.zombies:
            yield f"{report.zombies} calls were abandoned and have not ended since"
        fifth, end = self.resident[len(self.resident) // 5], self.resident[-1]
        if end > fifth + MORE_MIB:
            yield f"memory not flat: {fifth} MiB after a fifth of the run, {end} MiB at its end"
        for fn, kind in OFFENDERS.items():
            if self.called[fn.__name__] and not any(fn.__name__ in name for name in report.misuse.get(kind, {})):
                yield f"{fn.__name__} ran {self.called[fn.__name__]} times and is not named as {kind.value}"
        for kind, names in report.misuse.items():
            innocent = [name for name in names if name.rpartition(".")[2] in {"well_behaved", "score", "hangs"}]
            # While a function blocks the loop, or the machine is busy, a call can't heed its cancellation: whom that hits is chance.
            if innocent and kind not in {Misuse.BLOCKED, Misuse.ABANDONED}:
                yield f"{innocent} are named as {kind.value} and did nothing"


def settings() -> EngineSettings:
    """Short times, so that much happens; tries enough for everybody."""
    return EngineSettings(
        samples_per_prompt=2,
        max_running=64,
        deadlines=Deadlines(group=3.0, reward=10.0),
        retry=Retry(max_attempts=1_000_000, backoff_base=0.01, backoff_max=0.1),
    )


async def run(minutes: float, seed: int, backend: str) -> int:
    """The whole thing; its exit code."""
    done = Run(random.Random(seed), time.monotonic() + 60 * minutes)
    times = BridgeSettings(again=0.1, grace=3.0, slow_step=BLOCKS_S / 2)
    async with (
        open_bridge(backend, settings=times) as bridge,
        open_rollout_engine(
            IterableSource(done.prompts()),
            done.generate(bridge),
            servers=FakeServers(plan=lambda number, prompt: Say(seconds=0.02)),
            reward=asyncio_reward(score, bridge=bridge),
            settings=settings(),
        ) as engine,
    ):
        await done.take_all(engine)
        with trio.move_on_after(60):  # the deaf ones end by themselves
            while bridge.statistics().zombies:
                await trio.sleep(0.1)
        report, counts = bridge.statistics(), engine.statistics()
        complaints = list(done.complaints(report, engine))
    click.echo(f"{done.made} groups made, {len(done.delivered)} delivered, each once: {done.delivered.total()}")
    click.echo(f"called: {dict(done.called)}")
    click.echo(f"retries: { {cause.value: count for cause, count in counts.retries.items() if count} }")
    for kind, names in report.misuse.items():
        click.echo(f"{kind.value}: {names}")
    left = bridge.statistics()
    click.echo(f"afterwards {left.running} calls, {left.zombies} zombies; memory at most {max(done.resident)} MiB")
    if left.zombies:
        complaints.append(f"{left.zombies} calls have outlived the bridge")
    for complaint in complaints:
        click.echo(f"WRONG: {complaint}")
    return 1 if complaints else 0


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--minutes", default=10.0)
@click.option("--seed", default=0)
@click.option("--backend", type=click.Choice(["thread", "in-loop"]), default="thread")
def main(minutes: float, seed: int, backend: str) -> None:
    """Run it."""
    logging.basicConfig(level=logging.CRITICAL + 1)
    raise SystemExit(trio.run(run, minutes, seed, backend))


if __name__ == "__main__":
    main()
