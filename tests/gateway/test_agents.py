"""Real command-line agents, as they are, in sandboxes, offline, on the tiny server."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "mini": ROOT / ".venv-agents" / "bin" / "mini",
    "codex": ROOT / ".venv-agents" / "npm" / "node_modules" / ".bin" / "codex",
    "claude": ROOT / ".venv-agents" / "npm" / "node_modules" / "claude-code-2-1-332" / "bin" / "claude.exe",
}


@pytest.mark.agents
@pytest.mark.parametrize("agent", PROGRAMS)
def test_the_example_trains_it(agent):
    if not PROGRAMS[agent].exists():
        pytest.skip(f"{agent} is not installed")
    command = [
        sys.executable,
        ROOT / "examples" / "unmodified_agent.py",
        "--agent",
        agent,
        "--program",
        PROGRAMS[agent],
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "rewards [1.0, 1.0], turns [2, 2]" in done.stdout
