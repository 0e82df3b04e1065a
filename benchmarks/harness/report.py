"""The report of a benchmark: a header with machine and versions, JSON, a table, a plot."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click
from rich.console import Console
from rich.table import Table

from trio_rollout.sglang._wire import decoding

from .rounds import Median, Run

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("trio", "httpx", "aiohttp", "uvloop", "httptools", "msgspec", "numpy")
_WIDTH = 130
F = TypeVar("F", bound=Callable[..., Any])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def header() -> dict[str, Any]:
    """Machine, versions, load, time."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit.stdout.strip(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES}
        | {"decoding": "pure" if decoding.cut is None else "native"},
    }


@attrs.define
class Report:
    """Collects tables and verdicts, and writes them out."""

    name: str
    mode: str
    runs: Sequence[Run]
    began: dict[str, Any]
    tables: list[dict[str, Any]] = attrs.field(factory=list)
    verdicts: list[dict[str, Any]] = attrs.field(factory=list)
    left_out: list[str] = attrs.field(factory=list)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table."""
        shown = [[str(value) if value is not None else "-" for value in row] for row in rows]
        self.tables.append({"title": title, "columns": list(columns), "rows": shown})

    def verdict(
        self, what: str, found: Median | None, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """Add a target and whether it was met."""
        limit = at_most if at_most is not None else at_least
        if limit is None:
            raise AssertionError("a target has a limit")
        met = None if found is None else found.value <= limit if at_most is not None else found.value >= limit
        self.verdicts.append({
            "what": what,
            "found": None if found is None else attrs.asdict(found),
            "limit": limit,
            "kind": "at most" if at_most is not None else "at least",
            "met": met,
            "text": found.shown(3) if found is not None else "-",  # 0.40 of at most 0.40 may be met or missed
        })

    def finish(self, out: Path, plot: Callable[[Any], None] | None) -> None:
        """Print, and write NAME.json, NAME.txt and NAME.svg."""
        out.mkdir(parents=True, exist_ok=True)
        if self.verdicts:
            rows = [
                (
                    one["what"],
                    one["text"],
                    f"{one['kind']} {one['limit']:g}",
                    {True: "met", False: "missed", None: "no result"}[one["met"]],
                )
                for one in self.verdicts
            ]
            self.table("targets", ("what", "found", "target", ""), rows)
        with (out / f"{self.name}.txt").open("w", encoding="utf-8") as file:
            for console in (Console(width=max(_WIDTH, Console().width)), Console(file=file, width=_WIDTH)):
                self._print(console)
        found = {
            "benchmark": self.name,
            "mode": self.mode,
            "header": self.began,
            "load_after": os.getloadavg()[0],
            "targets": self.verdicts,
            "tables": self.tables,
            "left_out": self.left_out,
            "runs": [attrs.asdict(run) for run in self.runs],
        }
        (out / f"{self.name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        if plot is not None:
            _draw(out / f"{self.name}.svg", plot)

    def _print(self, console: Console) -> None:
        began = self.began
        versions = ", ".join(f"{package} {which}" for package, which in began["versions"].items())
        console.print(f"{self.name} ({self.mode}), {began['when']}, commit {began['commit']}")
        console.print(f"{began['cpus']} x {began['processor']}, load {began['load']:.1f} to {os.getloadavg()[0]:.1f}")
        console.print(f"Python {began['python']}, {versions}")
        for one in self.tables:
            table = Table(*one["columns"], title=one["title"])
            for row in one["rows"]:
                table.add_row(*row)
            console.print(table)
        for run in self.runs:
            if run.failed is not None:
                console.print(f"no result: {run.cell}, {run.arm}, round {run.round + 1}: {run.failed}", soft_wrap=True)
            if run.bottleneck is not None:
                console.print(
                    f"not its own: {run.cell}, {run.arm}, round {run.round + 1}: {run.bottleneck}", soft_wrap=True
                )
        for line in self.left_out:
            console.print(f"left out: {line}", soft_wrap=True)


def _draw(path: Path, plot: Callable[[Any], None]) -> None:
    import matplotlib as mpl  # noqa: PLC0415  an extra, and a second to import

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    plot(axes)
    figure.savefig(path)
    plt.close(figure)


def bars(values: Mapping[str, Median | None], *, label: str) -> Callable[[Any], None]:
    """A plot of one bar an arm, with the spread."""

    def draw(axes: Any) -> None:
        shown = {name: value for name, value in values.items() if value is not None}
        errors = [[one.value - one.low for one in shown.values()], [one.high - one.value for one in shown.values()]]
        axes.barh(list(shown), [one.value for one in shown.values()], xerr=errors)
        axes.set_xlabel(label)
        axes.invert_yaxis()

    return draw


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str) -> Callable[[Any], None]:
    """A plot of one line an arm, both axes logarithmic."""

    def draw(axes: Any) -> None:
        for name, points in series.items():
            axes.plot([one for one, _ in points], [other for _, other in points], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
        axes.legend()

    return draw


def options(function: F) -> F:
    """The options of every benchmark."""
    for option in (
        click.option("--quick", is_flag=True, help="Few cells, one round, under a minute: to see that it works."),
        click.option("--rounds", type=int, default=None, help="Rounds of each cell in place of the default."),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            default=RESULTS,
            show_default="benchmarks/results",
            help="Where JSON, table and plot go.",
        ),
        click.option("--quiet", is_flag=True, help="Print the tables only."),
    ):
        function = option(function)
    return function


def say_to_stderr(*, quiet: bool) -> Callable[[str], None]:
    """A line of progress for each run, unless ``quiet``."""
    return (lambda _line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))
