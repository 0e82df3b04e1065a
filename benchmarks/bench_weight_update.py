"""A weight update under load: time from its start to an idle server, and from its end to full load, in three modes.

The weights themselves change in no time, so what is measured is the engine's window. Where the mode keeps requests on the
server (retract, in_place) it never becomes idle: the time until it has paused is shown instead.
"""

from pathlib import Path

import click
from harness.arms import AIOHTTP, OURS
from harness.fake import Latency, fake_server
from harness.report import Report, bars, header, options, say_to_stderr
from harness.rounds import Arm, Cell, figures_of, median_of, run_cells
from harness.spec import Spec

COUNTS = (64, 512)
MODES = ("abort", "retract", "in_place")


def cell_of(count: int, mode: str, rounds: int) -> Cell:
    """So many in flight, updated in this mode."""
    return Cell(
        name=f"{count} in flight, {mode}",
        spec=Spec(url="", slots=count, mode=mode, limit=60),
        arms=[Arm(name=arm, world=arm, job="updated") for arm in (OURS, AIOHTTP)],
        latency=Latency(median=30_000),
        rounds=rounds,
    )


@click.command(help=__doc__)
@options
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool) -> None:
    """Measure and show."""
    began = header()
    counts, times = (COUNTS[:1], 1) if quick else (COUNTS, rounds or 3)
    cells = [cell_of(count, mode, times) for count in counts for mode in MODES]
    with fake_server() as server:
        runs = run_cells(server, cells, say=say_to_stderr(quiet=quiet))
    report = Report("weight_update", "quick" if quick else "full", runs, began)
    names = ("idle_ms", "enter_ms", "leave_ms", "full_ms")
    rows = [
        (
            cell.name,
            arm.name,
            *(median_of([value for value in figures_of(runs, cell.name, arm.name, name) if value]) for name in names),
        )
        for cell in cells
        for arm in cell.arms
    ]
    columns = ("cell", "arm", "server idle ms", "window open ms", "window closed ms", "full load ms")
    report.table("from the start: idle, open; from the end: closed, full. Medians (smallest to largest)", columns, rows)
    last = cells[-3]
    values = {arm.name: median_of(figures_of(runs, last.name, arm.name, "full_ms")) for arm in last.arms}
    report.finish(out, bars(values, label=f"ms from the end of the update to full load, {last.name}"))


if __name__ == "__main__":
    main()
