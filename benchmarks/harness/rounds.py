"""Runs of arms, each in a separate process, interleaved: every round does each arm once, beginning with another one."""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import attrs

from .fake import FakeServer, Latency, bottleneck
from .spec import Spec

BENCHMARKS = Path(__file__).parents[1]
_SAID = 400


@attrs.frozen(kw_only=True)
class Run:
    """One arm's figures in one round of one cell; ``failed`` says why there are none."""

    cell: str
    arm: str
    round: int
    load: float
    figures: Mapping[str, Any] = attrs.field(factory=dict)
    failed: str | None = None
    bottleneck: str | None = None


@attrs.frozen(kw_only=True)
class Arm:
    """One way to do a cell's job."""

    name: str
    world: str
    job: str
    changes: Mapping[str, Any] = attrs.field(factory=dict)
    """The fields in which it differs from the cell."""


@attrs.frozen(kw_only=True)
class Cell:
    """One comparison: the same job under the same conditions for all its arms."""

    name: str
    spec: Spec
    arms: Sequence[Arm]
    latency: Latency = attrs.field(factory=Latency)
    server: Mapping[str, float] = attrs.field(factory=dict)
    rounds: int = 1
    before: Callable[[FakeServer, Callable[[], "subprocess.Popen[str]"]], dict[str, Any]] | None = None
    """An earlier life of the arm: starts it, ends it, configures the server again, and returns figures of it."""
    during: Callable[[FakeServer, "subprocess.Popen[str]"], None] | None = None
    """A disturbance of the server while the job runs."""
    after: Callable[[FakeServer, dict[str, Any]], None] | None = None
    """Adds what only the server can say afterwards."""


def _outcome(child: "subprocess.Popen[str]", seconds: float) -> dict[str, Any]:
    try:
        out, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"failed": f"no result within {seconds:g} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode == 0 and not lines:
        return {"failed": "the process ended with status 0, before its job did"}
    if child.returncode:
        return {"failed": f"exit code {child.returncode}: {errors.strip()[-_SAID:]}"}
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def run_once(server: FakeServer, cell: Cell, arm: Arm, number: int) -> Run:
    """Configure the server, run the arm in a process, look at the server."""
    server.configure(cell.latency, **{"disconnect": 0, **cell.server})
    spec = json.dumps(attrs.evolve(cell.spec, url=server.url, **arm.changes).to_json())
    load = os.getloadavg()[0]

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "harness.arms", arm.world, arm.job, spec]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=BENCHMARKS)

    earlier = {} if cell.before is None else cell.before(server, start)
    child = start()
    try:
        if cell.during is not None:
            cell.during(server, child)
        figures = {**earlier, **_outcome(child, cell.spec.limit + 30)}
        if cell.after is not None and "failed" not in figures:
            cell.after(server, figures)
    finally:
        child.kill()
        child.wait()
        if server.process is None:
            server.start()
    failed = figures.pop("failed", None)
    seen = {name.removeprefix("server_"): value for name, value in figures.items() if name.startswith("server_")}
    return Run(
        cell=cell.name,
        arm=arm.name,
        round=number,
        load=load,
        figures=figures,
        failed=failed,
        bottleneck=bottleneck(seen) if "late_p50_ms" in seen else None,
    )


def run_cells(server: FakeServer, cells: Sequence[Cell], *, say: Callable[[str], None]) -> list[Run]:
    """All cells, round by round, the arms of a cell next to each other. Interrupted (Ctrl-C): what there is until then."""
    runs: list[Run] = []
    begun = time.monotonic()
    try:
        for number, cell, arm in _order(cells):
            run = run_once(server, cell, arm, number)
            runs.append(run)
            what = run.failed or ", ".join(filter(None, starmap(_shown, run.figures.items())))
            say(f"{time.monotonic() - begun:5.0f} s  round {number + 1}  {cell.name}  {arm.name}: {what[:160]}")
    except KeyboardInterrupt:
        say("interrupted: the report is of what was done")
    return runs


def _order(cells: Sequence[Cell]) -> Iterator[tuple[int, Cell, Arm]]:
    for number in range(max(cell.rounds for cell in cells)):
        for cell in cells:
            turn = number % len(cell.arms)
            for arm in [*cell.arms[turn:], *cell.arms[:turn]] if number < cell.rounds else ():
                yield number, cell, arm


def _shown(name: str, value: Any) -> str:
    return "" if isinstance(value, list) else f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}"


@attrs.frozen
class Median:
    """The middle of an arm's rounds, and the smallest and largest of them."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return self.shown(0 if abs(self.value) >= 100 else 1 if abs(self.value) >= 10 else 2)

    def shown(self, digits: int) -> str:
        """With so many digits behind the point; the range only if there was more than one round."""
        spread = f" ({self.low:.{digits}f} to {self.high:.{digits}f})" if self.count > 1 else ""
        return f"{self.value:.{digits}f}{spread}"


def median_of(values: Sequence[float]) -> Median | None:
    """None without values."""
    if not values:
        return None
    return Median(statistics.median(values), min(values), max(values), len(values))


def figures_of(runs: Sequence[Run], cell: str, arm: str, name: str) -> list[float]:
    """A figure in each round in which the arm had a result."""
    return [
        float(run.figures[name])
        for run in runs
        if run.cell == cell and run.arm == arm and run.failed is None and name in run.figures
    ]


def ratio(runs: Sequence[Run], ours: tuple[str, str], theirs: tuple[str, str], name: str) -> Median | None:
    """The ratio of two arms, (cell, arm), round by round: what the machine did in a round, it did to both."""
    by_round = [
        {run.round: run.figures for run in runs if (run.cell, run.arm) == who and not run.failed}
        for who in (ours, theirs)
    ]
    both = sorted(by_round[0].keys() & by_round[1].keys())
    return median_of([
        by_round[0][number][name] / by_round[1][number][name] for number in both if by_round[1][number].get(name)
    ])


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of log(y) over log(x): 0 is flat, 1 is proportional."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
