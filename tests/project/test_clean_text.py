"""Nothing in the repository belongs to one machine, or was left for later."""

import re
from pathlib import Path

import pytest

from ._source import ROOT, report, tracked_files

# Spelt so that this file does not contain what it looks for.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.$/-])/(?:work|farm|root|home|Users|tmp/[a-z])(?![\w-])/?",
    "the host of a package registry": r"index-ur[l]|https?://[^\s/]*(?:pypi|registry|pythonhosted)[^\s/]*|https?://\S*/simple\b",
    "something left for later": r"\b(?:TOD[O]|FIXM[E]|XX[X])\b",
}
SAFE = {ROOT / "tests" / "project" / "test_clean_text.py"}


def findings(path: Path) -> list[str]:
    """What must not be in this file, with its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    return [
        f"{path}:{number}: {what}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if re.search(pattern, line)
    ]


def test_tracked_files_are_clean():
    wrong = [line for path in tracked_files() if path not in SAFE for line in findings(path)]
    assert not wrong, report(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "cd /wo" + "rk/main",
        "open('/ro" + "ot/x')",
        "--index-ur" + "l=x",
        "https://py" + "pi.org/project",
        "# FIX" + "ME: later",
    ],
)
def test_each_kind_is_seen(line: str, tmp_path: Path):
    (tmp_path / "file.md").write_text(f"fine\n{line}\n")
    assert [found.partition(":")[2].partition(":")[0] for found in findings(tmp_path / "file.md")] == ["2"]


@pytest.mark.parametrize("line", ["run /dev/null", "POST /generate", "see docs/work/x", "a/home/b", "$TMPDIR/a"])
def test_what_is_fine_is_not(line: str, tmp_path: Path):
    (tmp_path / "file.md").write_text(line)
    assert not findings(tmp_path / "file.md")
