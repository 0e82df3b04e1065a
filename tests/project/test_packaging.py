"""What ``pip install`` gives: both packages, their marker files and their data, the command; and nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ._source import PACKAGES, ROOT, tracked_files


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist, made by the build backend itself, without a network."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return directory


def test_the_wheel_holds_both_packages_and_all_of_their_files(built: Path):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        entry_points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    expected = {
        f"{package}/{path.relative_to(directory).as_posix()}"
        for package, directory in PACKAGES.items()
        for path in tracked_files()
        if path.is_relative_to(directory)
    }

    assert not expected - names
    assert {"trio_rollout/py.typed", "trio_rollout_compat/py.typed"} <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert "trio-rollout = trio_rollout.cli:main" in entry_points


def test_the_sdist_holds_what_the_tests_need(built: Path):
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}

    assert {
        "pyproject.toml",
        "Makefile",
        "LICENSE",
        "README.md",
        "tests/conftest.py",
        "trio_rollout/__init__.py",
    } <= names
