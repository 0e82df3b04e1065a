"""Rollouts on the nodes of a Ray cluster: `python examples/ray_rollouts.py` (needs the extra `ray`).

Three engines, each an actor with its own server; one lease service that owns the prompts and the ledger. The trainer is this
program: it takes batches, fetches what it trains on, and acks. Kill any of the actors meanwhile: nothing is lost. Without a cluster
it starts a small one here; with `--address auto` it uses the one that this machine belongs to.
"""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import click
import ray

from trio_rollout import (
    EngineSettings,
    IterableSource,
    Prompt,
    SamplingParams,
    SingleTurn,
    Trajectory,
    open_sglang_servers,
)
from trio_rollout.errors import EndOfData
from trio_rollout.tiny import DATA, open_tiny_process
from trio_rollout_compat.ray import NodeParts, open_ray_rollouts

NODES = 3
SETTINGS = EngineSettings(samples_per_prompt=4, max_running=16, max_ready=8)  # of each node


def open_source() -> IterableSource:
    """Called where the lease service runs; the same prompts each time, so that a ledger can go on."""
    return IterableSource(Prompt(id=str(number), text="say") for number in range(24))


async def count_vowels(trajectory: Trajectory) -> float:  # noqa: ASYNC124  a reward is an async function
    """Runs on the node, like everything that makes a group."""
    return float(sum(letter in "aeiou" for letter in trajectory.text))


@asynccontextmanager
async def open_parts() -> AsyncGenerator[NodeParts]:
    """The parts of one node's engine. In your program, name the SGLang servers of the node instead of starting one."""
    async with open_tiny_process() as server, open_sglang_servers([server.url], tokenizer=DATA) as servers:
        yield NodeParts(generate=SingleTurn(SamplingParams(max_new_tokens=8)), servers=servers, reward=count_vowels)


@click.command(help=__doc__)
@click.option("--address", help="of a Ray cluster; without it one is started")
def main(address: str | None) -> None:
    """The trainer."""
    options = {} if address else {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    ray.init(address=address, log_to_driver=False, **options)
    with (
        tempfile.TemporaryDirectory() as directory,
        open_ray_rollouts(
            open_source,
            open_parts,
            nodes=NODES,
            ledger=Path(directory) / "ledger",
            settings=SETTINGS,
            node_options={"num_cpus": 0.1},
        ) as rollouts,
    ):
        try:
            while True:
                batch = rollouts.next_batch(8)
                groups = ray.get(list(batch.groups))
                rewards = [row.reward for group in groups for row in group.trajectories]
                print(f"step {batch.step}: {len(groups)} groups, mean reward {sum(rewards) / len(rewards):.2f}")
                batch.ack()  # when your checkpoint is safe
        except EndOfData:
            print(f"done: {rollouts.statistics().acked} groups on {len(rollouts.nodes())} nodes")
    ray.shutdown()


if __name__ == "__main__":
    main()
