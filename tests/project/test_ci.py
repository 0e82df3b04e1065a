"""What ``.ci/run`` makes of targets that pass, fail, or cannot be installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ._source import ROOT

CLOSING = "======== 3 passed in 0.01s ========"
GREEN = {"setup": "true", "check": "true", "test": f"echo '{CLOSING}'"}


def run_ci(folder: Path, targets: dict[str, str]) -> tuple[int, list[str]]:
    """The exit code and the summary of a run with these make targets."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "Makefile").write_text("".join(f"{name}:\n\t@{command}\n" for name, command in targets.items()))
    done = subprocess.run([folder / ".ci" / "run"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.partition("=== summary")[2].splitlines()[1:]


def test_everything_that_exists_runs_and_pytests_closing_line_is_shown(tmp_path: Path):
    status, summary = run_ci(tmp_path, {**GREEN, "setup-sglang": "true", "test-sglang": "true", "test-agents": "true"})

    assert status == 0
    assert [line.split(", ")[:2] for line in summary] == [
        [f"{name}: ran", "passed"] for name in ("check", "test", "test-sglang", "test-agents")
    ]
    assert summary[1].endswith(CLOSING)


def test_only_what_cannot_be_installed_is_left_out_and_the_reason_is_given(tmp_path: Path):
    status, summary = run_ci(tmp_path, {**GREEN, "setup-sglang": "echo no such wheel; exit 1", "test-sglang": "true"})

    assert status == 0
    assert summary[-1] == "test-sglang: did not run, could not be installed: no such wheel"


@pytest.mark.parametrize("target", ["check", "test", "test-agents"])
def test_one_failure_fails_all_of_it_and_stops_nothing(tmp_path: Path, target: str):
    status, summary = run_ci(tmp_path, {**GREEN, "test-agents": "true", target: "exit 1"})

    assert status == 1
    assert [line.partition(":")[0] for line in summary] == ["check", "test", "test-agents"]
    assert [line.partition(":")[0] for line in summary if "FAILED" in line] == [target]


def test_without_an_environment_nothing_has_been_tested(tmp_path: Path):
    status, summary = run_ci(tmp_path, {**GREEN, "setup": "echo no python; exit 1"})

    assert status == 1
    assert summary == ["nothing ran: .venv could not be made: no python"]
