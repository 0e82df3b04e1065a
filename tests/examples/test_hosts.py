"""The programs that hold an engine without being Trio programs run to their end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "steps"), [("asyncio_host", 3), ("trio_asyncio_host", 2)])
def test_the_program_gets_its_batches(name, steps):
    answer = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=EXAMPLES, capture_output=True, text=True, timeout=300, check=True
    )
    lines = answer.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"step {number}" for number in range(steps)], answer.stderr
    assert all("2 groups" in line for line in lines)


@pytest.mark.ray
@pytest.mark.filterwarnings("default")
def test_rollouts_on_ray_come_from_three_nodes():
    answer = subprocess.run(
        [sys.executable, "ray_rollouts.py"],
        cwd=EXAMPLES,
        env={**os.environ, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = answer.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 0", "step 1", "step 2", "done"], answer.stderr
    assert lines[-1] == "done: 24 groups on 3 nodes"
