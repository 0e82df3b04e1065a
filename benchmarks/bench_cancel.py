"""Cancelling many rollouts in flight: time until the client is quiet and until the server is idle, and what is left there.

Every slot holds a request that never ends by itself; then the engine's block is left. A request that is neither aborted nor
answered stays on the server for four seconds after its connection was closed, as SGLang has it.
"""

import time
from pathlib import Path
from typing import Any

import click
from harness.arms import AIOHTTP, AIOHTTP_UVLOOP, OURS
from harness.fake import FakeServer, fake_server
from harness.report import Report, bars, header, options, say_to_stderr
from harness.rounds import Arm, Cell, figures_of, median_of, ratio, run_cells
from harness.spec import Spec

COUNTS = {1000: 3, 8000: 2}
"""In flight, and how many rounds."""
IDLE_WITHIN_S = 30.0


def wait_until_idle(server: FakeServer, figures: dict[str, Any]) -> None:
    """When the server became idle, counted from the cancellation."""
    until = time.monotonic() + IDLE_WITHIN_S
    while (found := server.stats())["running"] and time.monotonic() < until:
        time.sleep(0.02)
    figures["idle"] = found["idle_at"] - figures["left_at"] if not found["running"] else IDLE_WITHIN_S
    figures["server_aborts"] = found["aborts"]


def cell_of(count: int, rounds: int) -> Cell:
    """So many rollouts, all in flight."""
    return Cell(
        name=f"{count} in flight",
        spec=Spec(url="", slots=count, groups=None, limit=120),
        arms=[Arm(name=arm, world=arm, job="cancelled") for arm in (OURS, AIOHTTP, AIOHTTP_UVLOOP)],
        server={"hang_below": 65_536, "hang_times": 65_536, "disconnect": 4000},
        rounds=rounds,
        after=wait_until_idle,
    )


@click.command(help=__doc__)
@options
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool) -> None:
    """Measure and show."""
    began = header()
    cells = [cell_of(256, 1)] if quick else [cell_of(count, rounds or times) for count, times in COUNTS.items()]
    with fake_server() as server:
        runs = run_cells(server, cells, say=say_to_stderr(quiet=quiet))
    report = Report("cancel", "quick" if quick else "full", runs, began)
    names = ("wall", "idle", "server_running", "cpu_us", "server_aborts")
    rows = [
        (cell.name, arm.name, *(median_of(figures_of(runs, cell.name, arm.name, name)) for name in names))
        for cell in cells
        for arm in cell.arms
    ]
    columns = ("cell", "arm", "client quiet s", "server idle s", "left when quiet", "CPU us a rollout", "aborts sent")
    report.table("medians (smallest to largest)", columns, rows)
    if not quick:
        for cell in cells:
            found = ratio(runs, (cell.name, OURS), (cell.name, AIOHTTP), "wall")
            report.verdict(f"mass cancel vs asyncio, wall time, {cell.name}", found, at_most=3.5)
    last = cells[-1]
    report.left_out = ["httpx: it collapses above 64 in flight (bench_generate.py)"]
    values = {arm.name: median_of(figures_of(runs, last.name, arm.name, "wall")) for arm in last.arms}
    report.finish(out, bars(values, label=f"seconds until the client is quiet, {last.name}"))


if __name__ == "__main__":
    main()
