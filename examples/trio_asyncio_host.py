"""The engine beside asyncio code in one thread: `python examples/trio_asyncio_host.py`.

The program runs under `trio_asyncio.run`; its main function is asyncio and goes into Trio where it talks to the engine. For a
program that is yours from end to end: importing trio_asyncio changes asyncio in the whole process (see docs/embedding.md).
"""

import asyncio

import trio_asyncio

from trio_rollout import (
    EngineSettings,
    IterableSource,
    Prompt,
    RolloutEngine,
    SingleTurn,
    exact_match,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.tiny import DATA, open_tiny_process

STEPS = 2


async def asyncio_main(engine: RolloutEngine) -> None:
    """Asyncio: its own tasks run side by side with the engine's."""
    for _ in range(STEPS):
        batch, _ = await asyncio.gather(trio_asyncio.trio_as_aio(engine.next_batch)(2), asyncio.sleep(0))
        print(f"step {batch.step}: {len(batch.groups)} groups")
        await trio_asyncio.trio_as_aio(batch.ack)()


async def main() -> None:
    """Trio: the scopes."""
    async with (
        open_tiny_process() as server,
        open_sglang_servers([server.url], tokenizer=DATA) as servers,
        open_rollout_engine(
            IterableSource([Prompt(id=str(number), text="say", label="a") for number in range(8)]),
            SingleTurn(),
            servers=servers,
            reward=exact_match,
            settings=EngineSettings(samples_per_prompt=2, max_running=8),
        ) as engine,
    ):
        await trio_asyncio.aio_as_trio(asyncio_main)(engine)


if __name__ == "__main__":
    trio_asyncio.run(main)
