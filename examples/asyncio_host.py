"""The engine in a program whose main is asyncio: `python examples/asyncio_host.py`.

The engine lives on a separate thread, and its rollouts go on while the program works. The program awaits batches, trains,
and saves, all in asyncio. The reward function is asyncio code, too: it runs on the program's own loop.
"""

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from trio_rollout import (
    Batch,
    EngineSettings,
    IterableSource,
    Prompt,
    RolloutEngine,
    SamplingParams,
    SingleTurn,
    Trajectory,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.tiny import DATA, open_tiny_process
from trio_rollout_compat import aopen_engine_thread, asyncio_reward, exit_on_sigterm, open_bridge

STEPS = 3


async def count_vowels(trajectory: Trajectory) -> float:
    """A judge that is asked over the network would stand here."""
    await asyncio.sleep(0)
    return float(sum(letter in "aeiou" for letter in trajectory.text))


@asynccontextmanager
async def open_engine(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[RolloutEngine]:
    """Trio from here on. The order is that of the scopes: what is used by the engine is opened outside of it."""
    prompts = (Prompt(id=str(number), text="say") for number in itertools.count())
    async with (
        open_tiny_process() as server,
        open_sglang_servers([server.url], tokenizer=DATA) as servers,
        open_bridge(loop=loop) as bridge,
        open_rollout_engine(
            IterableSource(prompts),
            SingleTurn(SamplingParams(max_new_tokens=8)),
            servers=servers,
            reward=asyncio_reward(count_vowels, bridge=bridge),
            settings=EngineSettings(samples_per_prompt=4, max_running=16),
        ) as engine,
    ):
        yield engine


async def train(batch: Batch) -> None:
    """Your trainer; the mean reward is all that this one learns."""
    await asyncio.sleep(0)
    rewards = [row.reward for group in batch.groups for row in group.trajectories if isinstance(row.reward, float)]
    print(f"step {batch.step}: {len(batch.groups)} groups, mean reward {sum(rewards) / len(rewards):.2f}")


async def main() -> None:
    """An asyncio program: its loop goes on while the engine starts and while it ends."""
    lifespan = functools.partial(open_engine, asyncio.get_running_loop())
    async with aopen_engine_thread(lifespan) as engine:
        for _ in range(STEPS):
            batch = await engine.acall(engine.value.next_batch, 2)
            await train(batch)
            await engine.acall(batch.ack)


if __name__ == "__main__":
    with exit_on_sigterm():
        asyncio.run(main())
