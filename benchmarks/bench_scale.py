"""CPU and memory per rollout as the rollouts in flight grow from 100 to 10,000, at the same offered load.

The latency grows with the number in flight, so that the answers a second stay the same: what grows then is what a number
costs, not what a load does. Growth is stated as the exponent of a power law: 0 is flat.
"""

from collections.abc import Sequence
from pathlib import Path

import click
from harness.arms import AIOHTTP, OURS
from harness.fake import Latency, fake_server
from harness.report import Report, header, lines, options, say_to_stderr
from harness.rounds import Arm, Cell, Median, Run, exponent, figures_of, median_of, ratio, run_cells
from harness.spec import Spec

COUNTS = (100, 300, 1000, 3000, 10_000)
ANSWERS_A_SECOND = 500
ARMS = (OURS, AIOHTTP)
# 10,000 need twenty seconds for their first answers, and as many to start on a busy machine.
LIMIT_S = 240


def cell_of(count: int, rounds: int, window: float) -> Cell:
    """So many in flight."""
    return Cell(
        name=f"{count} in flight",
        spec=Spec(url="", slots=count - count % 8, window=window, warm=count // 2, limit=LIMIT_S),
        arms=[Arm(name=arm, world=arm, job="steady") for arm in ARMS],
        latency=Latency(median=count / ANSWERS_A_SECOND * 1000, sigma=0.3),
        rounds=rounds,
    )


def full_cell_of(count: int, rounds: int | None) -> Cell:
    """More of those that a target is about: a single full collection takes half a second where 10,000 are in flight."""
    target = count in {COUNTS[0], COUNTS[-1]}
    return cell_of(count, rounds or (2 if target else 1), 8.0 if target else 4.0)


def growth(cells: Sequence[Cell], runs: Sequence[Run], arm: str, name: str) -> Median | None:
    """The exponent, over the medians of all cells."""
    points = [
        (cell.spec.slots, found.value) for cell in cells if (found := median_of(figures_of(runs, cell.name, arm, name)))
    ]
    return median_of([exponent(points)]) if len(points) > 1 else None


@click.command(help=__doc__)
@options
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool) -> None:
    """Measure and show."""
    began = header()
    cells = (
        [cell_of(count, 1, 1.0) for count in COUNTS[:3]] if quick else [full_cell_of(count, rounds) for count in COUNTS]
    )
    with fake_server() as server:
        runs = run_cells(server, cells, say=say_to_stderr(quiet=quiet))
    report = Report("scale", "quick" if quick else "full", runs, began)
    names = ("cpu_us", "kb_per_rollout", "mb", "rps", "excess_p99_ms")
    rows = [
        (cell.name, arm.name, *(median_of(figures_of(runs, cell.name, arm.name, name)) for name in names))
        for cell in cells
        for arm in cell.arms
    ]
    columns = ("cell", "arm", "CPU us a rollout", "KB a rollout in flight", "MB", "rollouts/s", "excess p99 ms")
    report.table("medians (smallest to largest)", columns, rows)
    report.table("growth exponents", ("arm", "CPU"), [(arm, growth(cells, runs, arm, "cpu_us")) for arm in ARMS])
    if not quick:
        first, last = cells[0].name, cells[-1].name
        report.verdict("growth of CPU per rollout, exponent", growth(cells, runs, OURS, "cpu_us"), at_most=0.06)
        grown = ratio(runs, (last, OURS), (first, OURS), "cpu_us")
        report.verdict("growth of CPU per rollout, 10,000 against 100 in flight", grown, at_most=1.3)
        memory = ratio(runs, (last, OURS), (last, AIOHTTP), "kb_per_rollout")
        report.verdict("memory per rollout in flight vs the baseline, 10,000", memory, at_most=2.0)
    series = {
        arm: [
            (cell.spec.slots, found.value)
            for cell in cells
            if (found := median_of(figures_of(runs, cell.name, arm, "cpu_us")))
        ]
        for arm in ARMS
    }
    report.finish(out, lines(series, x="rollouts in flight", y="CPU us a rollout"))


if __name__ == "__main__":
    main()
