"""Long tails: groups that hang, and utilisation of the slots against the ideal list schedule.

First the public report: 32 group slots, and the first 11 groups hang for good. What counts is how many groups a minute still
come, when the hung ones are back, and how many group slots stay lost. The baseline is run with a deadline for a group, as a
careful programmer would, and without, as in the report. Then lognormal latencies: the time in which three quarters of a job's
groups are done, ideal by list schedule against what was measured.
"""

import heapq
from collections.abc import Sequence
from pathlib import Path

import click
from harness.arms import AIOHTTP, OURS
from harness.fake import Latency, fake_server
from harness.report import Report, bars, header, options, say_to_stderr
from harness.rounds import Arm, Cell, Median, Run, median_of, run_cells
from harness.spec import Spec

NO_DEADLINE = "aiohttp, no deadline"
HUNG, GROUP_SLOTS, PER_GROUP = 11, 32, 4
SHARE = 0.75
HANGS, TAILS = "11 of 32 group slots hang", "lognormal latencies"


def hang_cell(*, seconds: float, deadline: float) -> Cell:
    """More groups than can be done in the time."""
    spec = Spec(
        url="", slots=GROUP_SLOTS * PER_GROUP, per_group=PER_GROUP, groups=100_000, limit=seconds, group_s=deadline
    )
    return Cell(
        name=HANGS,
        spec=spec,
        arms=[
            Arm(name=OURS, world=OURS, job="finite"),
            Arm(name=AIOHTTP, world=AIOHTTP, job="finite"),
            Arm(name=NO_DEADLINE, world=AIOHTTP, job="finite", changes={"group_s": None}),
        ],
        latency=Latency(median=500, sigma=0.5, cap=4000),
        server={"hang_below": HUNG, "hang_times": PER_GROUP, "disconnect": 4000},
    )


def tail_cell(groups: int, *, rounds: int) -> Cell:
    """A job of so many groups."""
    return Cell(
        name=TAILS,
        spec=Spec(url="", slots=64, groups=groups, limit=120),
        arms=[Arm(name=arm, world=arm, job="finite") for arm in (OURS, AIOHTTP)],
        latency=Latency(median=700, sigma=0.8, cap=6000),
        rounds=rounds,
    )


def list_schedule(cell: Cell) -> list[float]:
    """When each group would be done if nothing but the server took time: groups start whole, rollouts end one by one."""
    spec = cell.spec
    free = [0.0] * spec.slots
    done = []
    for number in range(spec.groups or 0):
        # A group starts when so many slots are free; the heap's first ones are those.
        start = max(heapq.heappop(free) for _ in range(spec.per_group))
        ends = [start + cell.latency.draw(number, times) for times in range(spec.per_group)]
        for end in ends:
            heapq.heappush(free, end)
        done.append(max(ends))
    return sorted(done)


def utilisation(cell: Cell, runs: Sequence[Run], arm: str) -> Median | None:
    """Ideal time over measured time for the first three quarters of the groups: later the slots run empty by themselves."""
    ideal = list_schedule(cell)
    place = int(len(ideal) * SHARE)
    measured = [run.figures["came"] for run in runs if run.cell == cell.name and run.arm == arm and not run.failed]
    return median_of([ideal[place] / came[place][0] for came in measured if len(came) > place])


def hang_row(run: Run, cell: Cell) -> tuple[object, ...]:
    """Groups a minute while they hang and at the end, when the last hung group was back, how many never were."""
    came, deadline, seconds = run.figures["came"], cell.spec.group_s or 0.0, cell.spec.limit
    back = [at for at, name in came if int(name) < HUNG]
    before = sum(1 for at, _ in came if at < deadline) / deadline * 60
    late = sum(1 for at, _ in came if at >= seconds / 2) / (seconds / 2) * 60
    recovered = f"{max(back):.1f}" if len(back) == HUNG else "never"
    return (run.arm, f"{before:.0f}", f"{late:.0f}", recovered, HUNG - len(back), run.figures["duplicates"])


@click.command(help=__doc__)
@options
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool) -> None:
    """Measure and show."""
    began = header()
    hangs = hang_cell(seconds=10.0 if quick else 45.0, deadline=3.0 if quick else 15.0)
    tails = tail_cell(24 if quick else 200, rounds=1 if quick else rounds or 2)
    with fake_server() as server:
        runs = run_cells(server, [hangs, tails], say=say_to_stderr(quiet=quiet))
    report = Report("long_tail", "quick" if quick else "full", runs, began)
    columns = (
        "arm",
        "groups/min while they hang",
        "groups/min in the second half",
        "all back after s",
        "group slots lost",
        "delivered twice",
    )
    report.table(
        f"{HANGS}, deadline {hangs.spec.group_s:g} s",
        columns,
        [hang_row(run, hangs) for run in runs if run.cell == HANGS and not run.failed],
    )
    found = {arm.name: utilisation(tails, runs, arm.name) for arm in tails.arms}
    report.table(f"{TAILS}: share of the ideal list schedule", ("arm", "utilisation"), list(found.items()))
    if not quick:
        report.verdict("slot utilisation vs the ideal list schedule", found[OURS], at_least=0.97)
    report.finish(out, bars(found, label="share of the ideal list schedule"))


if __name__ == "__main__":
    main()
