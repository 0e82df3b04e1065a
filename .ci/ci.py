#!/usr/bin/env python3
"""Run the whole of CI: `make check` and `make test` always, then the long targets in the time that is left.

A long target is a `test-NAME` of the Makefile. Those whose rooms have changed come first. One starts only if its estimate
fits into the time before minute 40, so that CI usually takes some 30 minutes. Targets without time are reported as
not run; so are those that could not be installed, or that were stopped at minute 55. None of these counts as passed,
and none fails CI: only a failing test, `check` or `test` does. The only network access is to the package indexes.

Needs make and the standard library of Python 3.8 or later; nothing has to be installed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LAST_START_S = 40 * 60  # No long target starts unless its estimate ends before this.
LIMIT_S = 55 * 60  # Everything is stopped at this.
TERMINATE_S = 20  # Time for a stopped target to clean up before it is killed.
COMMITS = 10  # A change is compared with this many commits ago, where no default branch says better.
PYTEST_SUMMARY = re.compile(r"^=+ .* in [0-9.]+s.* =+$")


class Target(NamedTuple):
    """A long target: the name after `test-`, the estimate, and the rooms that it tests."""

    name: str
    seconds: int  # On two cores, with its installation.
    rooms: tuple[str, ...]  # Prefixes of paths.


LONG = (
    Target(
        "sglang",
        900,
        (
            "trio_rollout/_http/",
            "trio_rollout/gateway/_parsers.py",
            "trio_rollout/sglang/",
            "trio_rollout/tiny/",
            "tests/conformance/",
            "tests/real_sglang/",
        ),
    ),
    Target("kill", 180, ("trio_rollout/cli/", "trio_rollout/engine/", "trio_rollout/ledger/", "tests/kill/")),
    Target("ray", 300, ("compat/trio_rollout_compat/_leasing/", "compat/trio_rollout_compat/ray/")),
    Target("agents", 600, ("trio_rollout/gateway/", "trio_rollout/tokenizer/", "trio_rollout/tools/")),
)
UNKNOWN = Target("", 600, ())  # A target that the Makefile has and the table above has not.


class Result(NamedTuple):
    """The end of one make target."""

    status: int | None  # None: stopped at the limit.
    seconds: float
    output: list[str]

    @property
    def closing(self) -> str:
        """Pytest's closing line, or else the last line of the output that make did not write."""
        closing = [line for line in self.output if PYTEST_SUMMARY.match(line)]
        rest = [line for line in self.output if line and not line.startswith("make")]
        return (closing or rest or [""])[-1]


def has_target(makefile: str, target: str) -> bool:
    """Return True if a Makefile has this target."""
    return re.search(rf"^{re.escape(target)}\s*:(?!=)", makefile, re.MULTILINE) is not None


def long_targets(makefile: str, changed: set[str]) -> list[Target]:
    """Return the long targets of a Makefile: first those with a changed path in their rooms, then in the table's order."""
    present = re.findall(r"^test-([\w-]+)\s*:(?!=)", makefile, re.MULTILINE)
    in_table = {target.name for target in LONG}
    found = [target for target in LONG if target.name in present]
    found += [UNKNOWN._replace(name=name) for name in present if name not in in_table]

    def is_unchanged(target: Target) -> bool:
        return not any(path.startswith(room) for path in changed for room in target.rooms)

    return sorted(found, key=is_unchanged)


def git(root: Path, *arguments: str) -> str:
    """Return the output of a git command; empty if it fails or git is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def changed_paths(root: Path) -> set[str]:
    """Return the paths that differ from the base: the branching off origin's default branch, or else some commits ago.

    In a shallow clone the base is the oldest commit that is there; without git no path counts as changed.
    """
    head = git(root, "rev-parse", "HEAD")
    base = git(root, "merge-base", "HEAD", "refs/remotes/origin/HEAD")
    if base in {"", head}:  # No such branch, or CI of the default branch itself.
        recent = git(root, "rev-list", "--first-parent", f"--max-count={COMMITS + 1}", "HEAD").split()
        base = recent[-1] if recent else ""
    return set(git(root, "diff", "--name-only", base).splitlines()) if base else set()


class Run:
    """One run of CI: the clock, the summary, and whether something has failed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.makefile = (root / "Makefile").read_text()
        self.began = time.monotonic()
        self.summary: list[str] = []
        self.failed = False

    def elapsed(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self.began

    def make(self, target: str) -> Result:
        """Run a make target, with its output shown and kept, until it ends or the limit is reached."""
        print(f"=== make {target}", flush=True)
        began = self.elapsed()
        output: list[str] = []
        process = subprocess.Popen(
            ["make", target],
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def read() -> None:
            with process.stdout as lines:
                for line in lines:
                    output.append(line.rstrip("\n"))
                    print(line, end="", flush=True)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        status = wait(process, max(0.0, LIMIT_S - began))
        reader.join(timeout=5)  # A process that outlives make may hold the pipe.
        return Result(status, self.elapsed() - began, output)

    def always(self, target: str) -> None:
        """Run a target that CI cannot pass without."""
        self.report(target, self.make(target), at_limit="FAILED (stopped at the limit)", limit_fails=True)

    def long(self, target: Target) -> None:
        """Install and run a long target, if its estimate fits."""
        name = f"test-{target.name}"
        left = LAST_START_S - self.elapsed()
        if target.seconds > left:
            self.note(name, f"not run (no time): takes {target.seconds} s, {max(0, round(left))} s left")
            return
        if has_target(self.makefile, f"setup-{target.name}"):
            installed = self.make(f"setup-{target.name}")
            if installed.status is None:
                self.note(name, "not run (no time): its installation did not finish")
                return
            if installed.status:
                self.note(name, f"not run, could not be installed: {installed.closing}")
                return
        self.report(name, self.make(name), at_limit="did not finish, not counted as passed", limit_fails=False)

    def report(self, name: str, result: Result, *, at_limit: str, limit_fails: bool) -> None:
        """Note the end of a target that ran."""
        took = f"{result.seconds:.0f} s  {result.closing}".rstrip()
        if result.status is None:
            self.note(name, f"ran, {at_limit}, {took}", fails=limit_fails)
        elif result.status:
            self.note(name, f"ran, FAILED (exit {result.status}), {took}", fails=True)
        else:
            self.note(name, f"ran, passed, {took}")

    def note(self, name: str, text: str, *, fails: bool = False) -> None:
        """Add a line to the summary."""
        self.summary.append(f"{name}: {text}")
        self.failed = self.failed or fails


def wait(process: subprocess.Popen[str], seconds: float) -> int | None:
    """Return the exit status, or None if the time was over; the process has ended, with its children, in any case."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(TERMINATE_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(root: Path) -> int:
    """Run everything, print the summary, and return the exit status."""
    run = Run(root)
    installed = run.make("setup")
    if installed.status == 0:
        run.always("check")
        run.always("test")
        for target in long_targets(run.makefile, changed_paths(root)):
            run.long(target)
    else:
        run.note("nothing ran", f".venv could not be made: {installed.closing}", fails=True)
    print(f"=== summary after {run.elapsed():.0f} s", *run.summary, sep="\n")
    return int(run.failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # The running target is stopped first.
    sys.exit(main(Path(__file__).resolve().parents[1]))
