"""The benchmarks' own code on the path, and a fake server for each test."""

import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

collect_ignore = [] if shutil.which("cc") else ["test_both_engines.py", "test_harness.py"]


@pytest.fixture(scope="session")
def uvloops_own_pipe() -> None:
    """libuv opens a pipe for signals with its first loop and keeps it as long as the process lives: that is no leak."""
    import uvloop

    uvloop.new_event_loop().close()


@pytest.fixture
def server(uvloops_own_pipe) -> Generator:
    """The benchmarks' fake server, in a separate process."""
    from harness.fake import fake_server

    with fake_server() as running:
        yield running
