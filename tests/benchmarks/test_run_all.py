"""Results of full runs become a part of README.md."""

import json

import pytest
import run_all


@pytest.fixture
def results(tmp_path):
    """A folder with the result of one full run, one quick run and one of an older form; README.md lies in it too."""
    header = {
        "when": "2026-11-30 04:10 UTC",
        "commit": "abc",
        "cpus": 2,
        "processor": "x",
        "python": "3.11.7",
        "load": 0.5,
        "versions": {"trio": "0.35.0"},
    }
    target = {"what": "CPU vs it", "kind": "at most", "limit": 0.35, "text": "0.40 (0.3 to 0.5)", "met": False}
    full = {
        "benchmark": "generate",
        "mode": "full",
        "header": header,
        "load_after": 1.5,
        "targets": [target],
        "tables": [{"title": "medians", "columns": ["arm", "us"], "rows": [["ours | all", "12.5"]]}],
        "left_out": ["httpx above 64"],
        "runs": [{"cell": "c", "arm": "a", "round": 0, "failed": "no\nresult", "bottleneck": None}],
    }
    for name, changes in (("generate", {}), ("scale", {"mode": "quick"}), ("cancel", {"tables": None})):
        found = {key: value for key, value in {**full, **changes}.items() if value is not None}
        (tmp_path / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{run_all.BEGIN}\nold\n{run_all.END}\nafter\n", encoding="utf-8")
    return tmp_path


def test_full_results_are_written_between_the_marks_and_nothing_else_changes(results):
    found = run_all.results_in(results, list(run_all.MINUTES))
    assert [one["benchmark"] for one in found] == ["generate"]
    for _ in range(2):  # writing again changes nothing
        run_all.write_readme(found, results / "README.md")
        text = (results / "README.md").read_text(encoding="utf-8")
        assert text.startswith(f"before\n{run_all.BEGIN}\n")
        assert text.endswith(f"{run_all.END}\nafter\n")
        assert "old" not in text
    for line in (
        "| CPU vs it | at most 0.35 | 0.40 (0.3 to 0.5) | **missed** |",
        "| ours / all | 12.5 |",
        "- No result: c, a, round 1: no result",
        "- Left out: httpx above 64",
        "2026-11-30 04:10 UTC, commit abc, load 0.5 to 1.5.",
    ):
        assert line in text.splitlines()


def test_a_benchmark_that_fails_or_would_begin_too_late_is_named(tmp_path, monkeypatch):
    """One that does not exist fails with Python's own exit code; without time none is begun."""
    monkeypatch.setitem(run_all.MINUTES, "none of them", 1.0)
    (failed,) = run_all.run_all(["none of them"], quick=True, out=tmp_path, rounds=None, minutes=1)
    (late,) = run_all.run_all(["none of them"], quick=True, out=tmp_path, rounds=None, minutes=-1)
    assert failed.failed == "exit code 2"
    assert late.failed.startswith("not run")


def test_every_benchmark_is_run_by_it():
    scripts = {path.stem.removeprefix("bench_") for path in run_all.HERE.glob("bench_*.py")}
    assert scripts == set(run_all.MINUTES)
