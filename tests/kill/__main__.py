"""``python -m tests.kill``: engines killed at random moments, restarted and looked at, and a summary of it."""

import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from .belief import AGAIN, LOST, UNSETTLED
from .cycles import Cycles, run_cycles
from .turns import FAILED, IN_FLIGHT, UNWRITTEN, WRITTEN

GROUPS = ("cycles", "ledgers", "opened", "commits", "deliveries", "acks", "restored", "updated", LOST, AGAIN, UNSETTLED)
TURNS = (WRITTEN, "turns", IN_FLIGHT, UNWRITTEN, FAILED)


def _lane(cycles: int, seed: int) -> Cycles:
    with TemporaryDirectory(prefix="kill-") as folder:
        return run_cycles(Path(folder), cycles=cycles, seed=seed)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--cycles", type=click.IntRange(1), default=200, help="Kills in all.")
@click.option(
    "--jobs", type=click.IntRange(1), default=2, help="Jobs side by side, each with its own servers and seed."
)
@click.option("--seed", type=int, default=0, help="Of the first job; the others have the next ones.")
def main(cycles: int, jobs: int, seed: int) -> None:
    """Kill, and say what came of it."""
    start = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        lanes = list(pool.map(_lane, [-(-cycles // jobs)] * jobs, range(seed, seed + jobs)))
    counts = sum((lane.counts for lane in lanes), Counter[str]())
    for lane in lanes:
        for problem in lane.problems:
            click.echo(f"seed {lane.seed}: {problem}")
    found = ", ".join(f"{name} {counts[name]}" for name in (*GROUPS, *TURNS))
    click.echo(f"{found}; seeds {seed} to {seed + jobs - 1}; {time.monotonic() - start:.0f} s")
    sys.exit(1 if any(lane.problems for lane in lanes) else 0)


if __name__ == "__main__":
    main()
