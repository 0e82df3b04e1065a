"""``.ci/run``: which targets run, in which order, and what the summary says of each."""

import importlib.machinery
import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from ._source import ROOT

CLOSING = "======== 3 passed in 0.01s ========"
GREEN = {"setup": "true", "check": "true", "test": f"echo '{CLOSING}'"}


@pytest.fixture
def ci() -> ModuleType:
    """The script as a module."""
    loader = importlib.machinery.SourceFileLoader("ci_run", str(ROOT / ".ci" / "ci.py"))
    spec = importlib.util.spec_from_loader("ci_run", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def run_ci(ci, tmp_path, capfd):
    """Return the exit status and the summary of a run with these make targets."""

    def run(targets: dict[str, str]) -> tuple[int, list[str]]:
        (tmp_path / "Makefile").write_text("".join(f"{name}:\n\t@{command}\n" for name, command in targets.items()))
        status = ci.main(tmp_path)
        return status, capfd.readouterr().out.partition("=== summary")[2].splitlines()[1:]

    return run


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a function that runs git in a new repository."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q", "-b", "main")
    return git


def commit(git, folder: Path, *names: str) -> None:
    """One commit a file."""
    for name in names:
        (folder / name).write_text(name)
        git("add", name)
        git("commit", "-qm", name)


def test_everything_that_exists_runs_and_pytests_closing_line_is_shown(run_ci):
    status, summary = run_ci({**GREEN, "setup-sglang": "true", "test-sglang": "true", "test-agents": "true"})

    assert status == 0
    assert [line.split(", ")[:2] for line in summary] == [
        [f"{name}: ran", "passed"] for name in ("check", "test", "test-sglang", "test-agents")
    ]
    assert summary[1].endswith(CLOSING)


def test_only_what_cannot_be_installed_is_left_out_and_the_reason_is_given(run_ci):
    status, summary = run_ci({**GREEN, "setup-sglang": "echo no such wheel; exit 1", "test-sglang": "true"})

    assert status == 0
    assert summary[-1] == "test-sglang: not run, could not be installed: no such wheel"


@pytest.mark.parametrize("target", ["check", "test", "test-agents"])
def test_one_failure_fails_all_of_it_and_stops_nothing(run_ci, target: str):
    status, summary = run_ci({**GREEN, "test-agents": "true", target: "exit 1"})

    assert status == 1
    assert [line.partition(":")[0] for line in summary] == ["check", "test", "test-agents"]
    assert [line.partition(":")[0] for line in summary if "FAILED" in line] == [target]


def test_without_an_environment_nothing_has_been_tested(run_ci):
    status, summary = run_ci({**GREEN, "setup": "echo no python; exit 1"})

    assert status == 1
    assert summary == ["nothing ran: .venv could not be made: no python"]


def test_a_target_whose_estimate_does_not_fit_is_listed_as_not_run(ci, run_ci, monkeypatch):
    monkeypatch.setattr(ci, "LAST_START_S", 200)
    status, summary = run_ci({**GREEN, "test-sglang": "exit 1", "test-kill": "true"})

    assert status == 0
    assert summary[2].startswith("test-sglang: not run (no time): takes 900 s, ")
    assert summary[3].startswith("test-kill: ran, passed, ")


@pytest.mark.parametrize(
    ("slow", "status", "said"),
    [
        ("test", 1, "test: ran, FAILED (stopped at the limit), "),
        ("test-kill", 0, "test-kill: ran, did not finish, not counted as passed, "),
        ("setup-kill", 0, "test-kill: not run (no time): its installation did not finish"),
    ],
)
def test_a_target_that_reaches_the_limit_is_stopped(ci, run_ci, monkeypatch, slow, status, said):
    monkeypatch.setattr(ci, "LIMIT_S", 0.5)
    targets = {**GREEN, "setup-kill": "true", "test-kill": "true", slow: "sleep 60; echo late"}
    ended, summary = run_ci(targets)

    assert ended == status
    assert [line for line in summary if line.startswith(said)]
    assert "late" not in "".join(summary)


def test_targets_whose_rooms_changed_come_first_and_unknown_ones_last(ci):
    makefile = "test-hosts:\ntest-ray: x\ntest-sglang:\ntest-kill:\ntest-agents:\ntest-x := 1\n"

    def names(*changed: str) -> list[str]:
        return [target.name for target in ci.long_targets(makefile, set(changed))]

    assert names() == ["sglang", "kill", "ray", "agents", "hosts"]
    assert names("README.md") == names()
    assert names("trio_rollout/tools/_limits.py") == ["agents", "sglang", "kill", "ray", "hosts"]
    assert names("trio_rollout/ledger/_open.py", "tests/kill/child.py") == ["kill", "sglang", "ray", "agents", "hosts"]


def test_the_rooms_of_the_table_exist_and_the_targets_too(ci):
    assert [
        target.name for target in ci.LONG if not ci.has_target((ROOT / "Makefile").read_text(), f"test-{target.name}")
    ] == []
    assert [room for target in ci.LONG for room in target.rooms if not (ROOT / room).exists()] == []


def test_a_branch_is_compared_with_where_it_left_the_default_branch(ci, repository, tmp_path):
    commit(repository, tmp_path, "old")
    repository("update-ref", "refs/remotes/origin/main", "HEAD")
    repository("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    commit(repository, tmp_path, "new")
    (tmp_path / "old").write_text("not committed")

    assert ci.changed_paths(tmp_path) == {"new", "old"}


def test_without_a_default_branch_the_last_commits_count(ci, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(ci, "COMMITS", 2)
    commit(repository, tmp_path, "first", "second", "third", "fourth")

    assert ci.changed_paths(tmp_path) == {"third", "fourth"}


def test_a_shallow_clone_and_a_folder_without_git_count_as_unchanged(ci, repository, tmp_path):
    assert ci.changed_paths(tmp_path) == set()
    commit(repository, tmp_path, "first", "second")
    repository("clone", "-q", "--depth=1", f"file://{tmp_path}", "shallow")

    assert ci.changed_paths(tmp_path / "shallow") == set()
    assert ci.changed_paths(Path("/")) == set()


def test_the_script_runs_as_a_program(tmp_path):
    (tmp_path / ".ci").mkdir()
    for name in ("run", "ci.py"):
        (tmp_path / ".ci" / name).write_bytes((ROOT / ".ci" / name).read_bytes())
    (tmp_path / "Makefile").write_text("setup:\n\t@true\ncheck:\n\t@exit 3\ntest:\n\t@true\n")
    done = subprocess.run(["bash", tmp_path / ".ci" / "run"], capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stderr
    assert "check: ran, FAILED" in done.stdout
