"""The results of ``pip install``: both packages, their marker files and their data, the command, the extension if there is a
compiler; and nothing else."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ._source import PACKAGES, ROOT, tracked_files


def build(directory: Path, *targets: str, **environment: str) -> str:
    """Build, by the build backend itself, without a network; what was said."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    for target in targets:
        command += ["-t", target]
    done = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, env={**os.environ, **environment}
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist."""
    directory = tmp_path_factory.mktemp("dist")
    build(directory, "sdist", "wheel")
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
        "hatch_build.py",
        "tests/conftest.py",
        "trio_rollout/__init__.py",
    } <= names


DECODE = """
import sys
sys.path.insert(0, sys.argv[1])
import trio_rollout
from trio_rollout.sglang._wire import decoding
assert trio_rollout.__file__.startswith(sys.argv[1])
body = b'{"output_ids":[5],"meta_info":{"output_token_logprobs":[[-0.5,5,null]]}}'
print(decoding.cut is not None, list(decoding.decode_answer(body).output_ids) == [5])
"""


def decode_with(wheel: Path, directory: Path) -> str:
    """Return two words: the wheel has the extension, and it decodes an answer correctly."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    command = [sys.executable, "-c", DECODE, str(directory)]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout.strip()


def test_the_wheel_has_the_compiled_extension(built: Path, tmp_path: Path):
    wheel = next(built.glob("*.whl"))

    assert not wheel.name.endswith("none-any.whl")
    assert decode_with(wheel, tmp_path) == "True True"


def test_without_a_compiler_the_wheel_is_pure_and_says_so(tmp_path: Path):
    said = build(tmp_path, "wheel", CC="false")
    wheel = next(tmp_path.glob("*.whl"))

    assert "_triples.c was not compiled" in said
    assert wheel.name.endswith("py3-none-any.whl")
    assert decode_with(wheel, tmp_path / "unpacked") == "False True"
