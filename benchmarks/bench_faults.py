"""The same faults to both engines: groups lost, duplicated, stuck; requests left running on the server.

The script, by a prompt's number: of every 17 prompts one has a request that hangs, of every 13 one whose connection is reset,
of every 19 one that gets a 500, of every 23 one whose reward raises until its attempt ends. Twice the server is killed and
started again half a second later. Group deadline 6 s, five attempts.
"""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from harness.arms import AIOHTTP, AIOHTTP_UVLOOP, OURS
from harness.fake import FakeServer, Latency, fake_server
from harness.report import Report, bars, header, options, say_to_stderr
from harness.rounds import Arm, Cell, figures_of, median_of, run_cells
from harness.spec import Spec

LATENCY = Latency(median=300, sigma=0.7, cap=3000)
FAULTS = {
    "hang_mod": 17,
    "hang_rem": 5,
    "reset_mod": 13,
    "reset_rem": 2,
    "fail_mod": 19,
    "fail_rem": 7,
    "disconnect": 4000,
}
KILL_AFTER = (2.0, 4.0)
DOWN_S = 0.5
ARMS = (OURS, AIOHTTP, AIOHTTP_UVLOOP)


def kill_twice(server: FakeServer, child: "subprocess.Popen[str]") -> None:
    """Kill the server and start it again, twice. It has forgotten everything then, the faults included."""
    for seconds in KILL_AFTER:
        time.sleep(seconds)
        if child.poll() is not None:
            return
        server.kill()
        time.sleep(DOWN_S)
        server.start()
        server.configure(LATENCY, disconnect=4000)


def look(server: FakeServer, figures: dict[str, Any]) -> None:
    """Count the requests that the server still runs when the client has gone."""
    figures["orphans"] = server.stats()["running"]


def cell_of(name: str, groups: int, arms: Sequence[str], *, rounds: int, kills: bool) -> Cell:
    """One script."""
    return Cell(
        name=name,
        spec=Spec(
            url="",
            slots=128,
            per_group=4,
            groups=groups,
            group_s=6.0,
            attempts=5,
            backoff_s=0.2,
            reward_fails_mod=23,
            limit=90,
        ),
        arms=[Arm(name=arm, world=arm, job="finite") for arm in arms],
        latency=LATENCY,
        server=FAULTS,
        rounds=rounds,
        during=kill_twice if kills else None,
        after=look,
    )


@click.command(help=__doc__)
@options
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool) -> None:
    """Measure and show."""
    began = header()
    if quick:
        cells = [cell_of("faults", 40, ARMS[:2], rounds=1, kills=False)]
    else:
        times = rounds or 2
        cells = [
            cell_of("faults", 400, ARMS, rounds=times, kills=False),
            cell_of("faults and kills", 400, ARMS, rounds=times, kills=True),
        ]
    with fake_server() as server:
        runs = run_cells(server, cells, say=say_to_stderr(quiet=quiet))
    report = Report("faults", "quick" if quick else "full", runs, began)
    names = ("groups", "given_up", "lost", "duplicates", "wrong", "orphans", "wall")
    rows = [
        (cell.name, arm.name, *(median_of(figures_of(runs, cell.name, arm.name, name)) for name in names))
        for cell in cells
        for arm in cell.arms
    ]
    columns = (
        "cell",
        "arm",
        "groups delivered",
        "given up",
        "lost or stuck",
        "twice",
        "not whole",
        "left on the server",
        "wall s",
    )
    report.table("medians (smallest to largest)", columns, rows)
    report.left_out = ["httpx: at 128 in flight its own pool takes several times the latency (bench_generate.py)"]
    last = cells[-1]
    values = {arm.name: median_of(figures_of(runs, last.name, arm.name, "wall")) for arm in last.arms}
    report.finish(out, bars(values, label=f"seconds for the whole job, {last.name}"))


if __name__ == "__main__":
    main()
