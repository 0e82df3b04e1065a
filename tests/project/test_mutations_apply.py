"""The hand-made mutations (``make mutate``) still fit the code; whether they are caught takes minutes and is asked there."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "tests" / "mutations").glob("*.patch"))


def test_there_are_enough_of_them():
    assert len(PATCHES) >= 15


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_it_applies_and_names_tests_that_exist(patch):
    checked = subprocess.run(
        ["git", "apply", "--check", "-C1", str(patch)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    head = patch.read_text(encoding="utf-8").split("--- ", 1)[0]
    named = [word for line in head.splitlines() if line.startswith("tests:") for word in line.split()[1:]]
    assert named
    assert all((ROOT / name.split("::")[0]).exists() for name in named), named
