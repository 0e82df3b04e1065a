"""Every benchmark, one after the other, and the results in README.md: `make bench-full` runs this.

The most important come first. One that would begin after ``--minutes`` is left out and named; one that fails is named, and the
others go on. JSON, tables and plots are in benchmarks/results; with ``--write`` (the default of a full run) the part of
README.md between its two marks is written anew from all JSON of full runs that lies there.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from harness.fake import BUILD
from harness.report import RESULTS

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN, END = "<!-- results of run_all.py -->", "<!-- end of results -->"
# Minutes of a full run on two idle cores, for the order and for the person who waits.
MINUTES = {
    "generate": 14.0,
    "scale": 7.0,
    "cancel": 4.0,
    "long_tail": 4.0,
    "decode": 0.5,
    "stalls": 1.0,
    "weight_update": 2.0,
    "faults": 7.0,
    "bridge": 1.0,
    "sessions": 2.0,
    "commit": 2.0,
    "tiny": 1.0,
}
# A benchmark that takes this many times its estimate, and some minutes, hangs.
PATIENCE, GRACE_MIN = 3.0, 5.0
_NUMBER = re.compile(r"-|[-0-9.,]+( \(.*\))?")


@attrs.frozen
class Ended:
    """The end of one benchmark: seconds, and the error if it failed."""

    name: str
    seconds: float
    failed: str | None = None


def run_one(name: str, *, quick: bool, out: Path, rounds: int | None) -> Ended:
    """Run one benchmark in a separate process; its tables go to this terminal."""
    command = [sys.executable, str(HERE / f"bench_{name}.py"), "--quiet", "--out", str(out)]
    command += ["--quick"] if quick else []
    command += ["--rounds", str(rounds)] if rounds else []
    begun, limit = time.monotonic(), 60 * (PATIENCE * MINUTES[name] + GRACE_MIN)
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as directory:  # on a disk, which /tmp may not be
        command += ["--dir", directory] if name == "commit" else []
        # In a new session, so that its fake server and its clients can be ended with it.
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return Ended(name, time.monotonic() - begun, f"no end within {limit:.0f} s")
            except BaseException:  # Ctrl-C does not reach that session
                os.killpg(process.pid, signal.SIGKILL)
                raise
    return Ended(name, time.monotonic() - begun, f"exit code {code}" if code else None)


def run_all(names: Sequence[str], *, quick: bool, out: Path, rounds: int | None, minutes: float) -> Iterator[Ended]:
    """Each in turn, as long as there is time to begin it."""
    begun = time.monotonic()
    for name in names:
        spent = (time.monotonic() - begun) / 60
        if spent > minutes:
            yield Ended(name, 0.0, f"not run: {spent:.0f} minutes were over, of {minutes:g}")
        else:
            print(f"--- bench_{name}.py, after {spent:.1f} minutes", flush=True)
            yield run_one(name, quick=quick, out=out, rounds=rounds)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    numbers = [all(_NUMBER.fullmatch(str(row[at])) for row in rows) for at in range(len(columns))]
    return [_row(columns), _row(["--:" if number else "---" for number in numbers]), *map(_row, rows)]


def _machine(began: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {which}" for package, which in began["versions"].items())
    return f"{began['cpus']} x {began['processor']}, Python {began['python']}, {versions}."


def _verdicts(found: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (one["what"], f"{one['kind']} {one['limit']:g}", one["text"], _said(met=one["met"]))
        for result in found
        for one in result["targets"]
    ]
    return _table(("target", "", "found", ""), rows) if rows else []


def _said(*, met: bool | None) -> str:
    return {True: "met", False: "**missed**", None: "**no result**"}[met]


def _notes(result: dict[str, Any]) -> list[str]:
    notes = []
    for run in result["runs"]:
        where = f"{run['cell']}, {run['arm']}, round {run['round'] + 1}"
        if run["failed"] is not None:
            notes.append(f"- No result: {where}: {' '.join(run['failed'].split())}")
        if run["bottleneck"] is not None:
            notes.append(f"- Not its own: {where}: {run['bottleneck']}")
    return [*notes, *(f"- Left out: {line}" for line in result["left_out"])]


def summary(found: Sequence[dict[str, Any]]) -> str:
    """All results as Markdown."""
    parts = [_machine(found[0]["header"]), "", *_verdicts(found)]
    for result in found:
        began = result["header"]
        load = f"load {began['load']:.1f} to {result['load_after']:.1f}"
        parts += ["", f"### bench_{result['benchmark']}.py", "", f"{began['when']}, commit {began['commit']}, {load}."]
        for table in result["tables"]:
            parts += ["", f"{table['title'].capitalize()}:", "", *_table(table["columns"], table["rows"])]
        notes = _notes(result)
        parts += ["", *notes] if notes else []
    return "\n".join(parts)


def results_in(out: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results that full runs have left there, in order."""
    paths = [out / f"{name}.json" for name in names]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    return [one for one in found if one.get("mode") == "full" and "tables" in one]


def write_readme(found: Sequence[dict[str, Any]], readme: Path = README) -> None:
    """Put the summary between the marks."""
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{summary(found)}\n\n{END}{after}", encoding="utf-8")


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="The quick modes: to see that all of them work.")
@click.option("--only", multiple=True, type=click.Choice(list(MINUTES)), help="These only (repeatable).")
@click.option("--rounds", type=int, default=None, help="Rounds of each cell in place of the defaults.")
@click.option("--minutes", type=float, default=37.0, show_default=True, help="Begin none after so long.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Where JSON, tables and plots go.")
@click.option("--write/--no-write", default=None, help="Write README.md (default: after a full run).")
def main(
    *, quick: bool, only: tuple[str, ...], rounds: int | None, minutes: float, out: Path, write: bool | None
) -> None:
    """Run, sum up, and fail if one of them has failed."""
    names = list(only or MINUTES)
    ended = list(run_all(names, quick=quick, out=out, rounds=rounds, minutes=minutes))
    found = results_in(out, list(MINUTES))
    if found and (write if write is not None else not quick):
        write_readme(found)
    for one in ended:
        print(f"bench_{one.name}.py: {one.failed or 'ran'}, {one.seconds:.0f} s")
    print(f"together {sum(one.seconds for one in ended) / 60:.1f} minutes")
    if any(one.failed for one in ended):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
