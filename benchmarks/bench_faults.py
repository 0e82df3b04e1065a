"""The same faults to both engines: groups lost, duplicated, stuck; requests left running on the server.

The script, by a prompt's number: of every 17 prompts one has a request that hangs, of every 13 one whose connection is reset,
of every 19 one that gets a 500, of every 23 one whose reward raises until its attempt ends. Twice the server is killed and
started again half a second later. Group deadline 6 s, five attempts. (A scorer that fails twice alike has failed for good here, so such a
group is given up; the baseline samples it again.)

A second table asks what is paid for twice, in rollouts of several turns: a sandbox that is lost with a chance for each rollout, a judge
that is down for five calls, exit() in a scorer, and a process that is killed when all samples but one of each group are
finished. Turns count as needed if they were sampled once for a delivered group; all others are waste. The baseline
tries a group again, up to three times, and after a restart begins with the first group that was not delivered.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click
from harness.arms import AIOHTTP, AIOHTTP_UVLOOP, OURS
from harness.fake import BUILD, FakeServer, Latency, fake_server
from harness.report import Report, bars, header, options, say_to_stderr
from harness.rounds import Arm, Cell, Run, figures_of, median_of, run_cells
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


PAID_LATENCY = Latency(median=30, sigma=0.5, cap=300)
LINGER_S = 1.0
"""After this time what has finished is on disk, in an engine with a ledger."""
LEDGER = BUILD / "ledger-faults"


def first_life(server: FakeServer, start: Callable[[], "subprocess.Popen[str]"], *, turns: int) -> dict[str, Any]:
    """Let the first request for each prompt hang, kill the process when so many turns are done, and begin anew."""
    shutil.rmtree(LEDGER, ignore_errors=True)
    server.configure(PAID_LATENCY, hang_below=65_536, hang_times=1)
    child = start()
    try:
        while server.stats()["finished"] < turns and child.poll() is None:
            time.sleep(0.05)
        time.sleep(LINGER_S)
    finally:
        child.kill()
        child.communicate()
    done = server.stats()["finished"]
    server.configure(PAID_LATENCY)
    return {"turns_before": done}


def paid_cells(groups: int, per_group: int, turns: int, arms: Sequence[str], *, rounds: int) -> Iterator[Cell]:
    """The cells of the second table; all groups fit into the slots at once."""

    def cell(name: str, **changes: Any) -> Cell:
        more = {key: changes.pop(key) for key in ("before", "server") if key in changes}
        spec = Spec(
            url="",
            slots=groups * per_group,
            per_group=per_group,
            groups=groups,
            turns=turns,
            prompt=64,
            backoff_s=0.1,
            limit=90,
        )
        return Cell(
            name=name,
            spec=attrs.evolve(spec, **changes),
            arms=[Arm(name=arm, world=arm, job="finite") for arm in arms],
            latency=PAID_LATENCY,
            rounds=rounds,
            **more,
        )

    for chance in (0.05, 0.2):
        yield cell(f"sandbox lost, {chance:.0%}", loses=chance)
    yield cell("judge down for 5 calls", judge_fails=5)
    yield cell("exit() in a scorer", reward_exits=1)
    before = partial(first_life, turns=groups * (per_group - 1) * turns)
    yield cell("killed with finished siblings", ledger=str(LEDGER), before=before)


def waste_of(run: Run, spec: Spec) -> float:
    """The share of the sampled turns that were not needed."""
    sampled = run.figures["server_generates"] + run.figures.get("turns_before", 0)
    return 1 - run.figures["groups"] * spec.per_group * spec.turns / sampled


def paid_rows(cells: Sequence[Cell], runs: Sequence[Run]) -> Iterator[tuple[object, ...]]:
    """The rows of the second table."""
    for cell in cells:
        for arm in cell.arms:
            mine = [run for run in runs if (run.cell, run.arm) == (cell.name, arm.name)]
            whole = [run for run in mine if run.failed is None]
            figures = [
                median_of([float(run.figures[name]) for run in whole])
                for name in ("groups", "given_up", "server_generates", "wall")
            ]
            waste = median_of([100 * waste_of(run, cell.spec) for run in whole])
            ended = "" if len(whole) == len(mine) else "the process ended"
            yield cell.name, arm.name, cell.spec.groups, *figures[:3], waste, figures[3], ended


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
        paid = list(paid_cells(12, 4, 4, ARMS[:2], rounds=1))
    else:
        times = rounds or 2
        paid = list(paid_cells(60, 8, 10, ARMS[:2], rounds=times))
        cells = [
            cell_of("faults", 400, ARMS, rounds=times, kills=False),
            cell_of("faults and kills", 400, ARMS, rounds=times, kills=True),
        ]
    with fake_server() as server:
        runs = run_cells(server, [*cells, *paid], say=say_to_stderr(quiet=quiet))
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
    paid_columns = ("cell", "arm", "groups", "delivered", "given up", "turns asked for", "turns wasted %", "wall s", "")
    report.table("paid for twice, medians (smallest to largest)", paid_columns, list(paid_rows(paid, runs)))
    report.left_out = ["httpx: at 128 in flight its own pool takes several times the latency (bench_generate.py)"]
    last = cells[-1]
    values = {arm.name: median_of(figures_of(runs, last.name, arm.name, "wall")) for arm in last.arms}
    report.finish(out, bars(values, label=f"seconds for the whole job, {last.name}"))


if __name__ == "__main__":
    main()
