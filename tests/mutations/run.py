"""Apply each patch of this folder to a copy of the project and run the tests it names: they must fail.

A patch begins with lines of prose: what the mutation is, and ``tests:`` with what should notice. ``run.py [NAME…]`` runs
some of them; ``--jobs N`` that many side by side.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIME_LIMIT_S = 600


def tests_of(patch: Path) -> list[str]:
    """The test ids that the patch's head names."""
    head = patch.read_text(encoding="utf-8").split("--- ", 1)[0]
    return [word for line in head.splitlines() if line.startswith("tests:") for word in line.split()[1:]]


def copy_of_the_project(to: Path) -> None:
    """Copy what git tracks or would track, as it is in the work tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in filter(None, listing.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def survives(patch: Path) -> str | None:
    """Return the reason why the mutation was not caught; None if it was."""
    tests = tests_of(patch)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy_of_the_project(Path(folder))
        applied = subprocess.run(
            ["git", "apply", "-C1", str(patch)], cwd=folder, capture_output=True, text=True, check=False
        )
        if applied.returncode:
            return f"the patch does not apply: {applied.stderr.strip()}"
        paths = os.pathsep.join([folder, str(Path(folder) / "compat")])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None  # a hang is noticed too
    if done.returncode == 1:  # tests failed; every other status means that they did not run
        return None
    return f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-600:]}"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True)
def main(names: tuple[str, ...], jobs: int) -> None:
    """Run the mutations and say which the tests did not notice."""
    patches = [patch for patch in sorted(HERE.glob("*.patch")) if not names or patch.stem in names]
    with ThreadPoolExecutor(jobs) as pool:
        for patch, problem in zip(patches, outcomes := list(pool.map(survives, patches)), strict=True):
            click.echo(
                f"{'caught' if problem is None else 'MISSED'}  {patch.stem}" + (f": {problem}" if problem else "")
            )
    missed = sum(problem is not None for problem in outcomes)
    click.echo(f"{len(patches) - missed} of {len(patches)} mutations were caught")
    sys.exit(1 if missed or not patches else 0)


if __name__ == "__main__":
    main()
