"""kill -9 of the whole program in the middle of an episode: the next life samples only the turns that were not finished."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import apsw
import attrs
import pytest

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / ".venv-agents" / "bin" / "mini"
TURNS = 5
PATH = "/usr/local/bin:/usr/bin:/bin"

# The model calls a tool in each turn but the last. Each answer follows from the result before it: the tools run again in the
# second life, and if they did not, the conversation would be another one.
STEP = """
[[rules]]
last_contains = "step {number} is done"
answer = "On to step {following}."
calls = [{{ name = "bash", arguments = {{ command = "{command}" }} }}]
"""
FIRST = """
[[rules]]
contains = '"name": "bash"'
answer = "I begin."
calls = [{{ name = "bash", arguments = {{ command = "{command}" }} }}]
"""


def step(number: int) -> str:
    """Return a command that works only after the one before it, in the same sandbox."""
    before = f"test -e step-{number - 1} && " if number > 1 else ""
    return f"{before}touch step-{number} && sleep 0.3 && echo step {number} is done"


def script(last: str) -> str:
    """Return the model's words: ``last`` is the rule for the last answer."""
    steps = [
        STEP.format(number=number, following=number + 1, command=step(number + 1))
        for number in reversed(range(1, TURNS - 1))
    ]
    return "".join([last, *steps, FIRST.format(command=step(1))])


SAYS_THE_END = f"""
[[rules]]
last_contains = "step {TURNS - 1} is done"
answer = "All steps are done."
"""
SUBMITS = f"""
[[rules]]
last_contains = "step {TURNS - 1} is done"
answer = "All steps are done."
calls = [{{ name = "bash", arguments = {{ command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" }} }}]
"""


@attrs.define
class Stage:
    """A server that outlives the lives, and the orders of each life."""

    folder: Path
    url: str
    command: list[str] | None
    env: dict[str, str]
    before: int = 0
    """The answers that the server had sampled when the last life began."""

    def life(self, *, killed_after: int | None = None) -> list[str]:
        """Live once; with ``killed_after``, be killed as soon as so many turns are on disk. Return what was said."""
        orders = {
            "ledger": str(self.folder / "ledger"),
            "url": self.url,
            "folder": str(self.folder / "sandboxes"),
            "turns": TURNS,
            "command": self.command,
            "env": self.env,
            "killed_after": killed_after,
        }
        command = [sys.executable, "-m", "tests.gateway.killed_life", json.dumps(orders)]
        lines = []
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.strip())
                if lines[-1] == "begun":
                    self.before = self.sampled()
                if lines[-1] == f"recorded {killed_after}":
                    process.kill()
        assert process.returncode == (0 if killed_after is None else -9), lines
        return lines

    def recorded(self) -> int:
        """Return the number of turns on disk, which may be more than the killed life could say."""
        db = apsw.Connection(str(self.folder / "ledger" / "ledger.db"))
        try:
            ((count,),) = db.execute("SELECT count(*) FROM turns")
        finally:
            db.close()
        return int(count)

    def sampled(self) -> int:
        """Return the number of answers that the server has sampled to their end so far, for all lives."""
        return (self.folder / "notes").read_text("utf-8").count(" sampled\n")


@contextmanager
def open_stage(folder: Path, words: str | None, command: list[str] | None, env: dict[str, str]) -> Generator[Stage]:
    arguments = [str(folder / "notes"), "0.01"]
    if words is not None:
        (folder / "script.toml").write_text(words, encoding="utf-8")
        arguments.append(str(folder / "script.toml"))
    server = [sys.executable, "-m", "tests.gateway.counting_server", *arguments]
    with subprocess.Popen(server, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Stage(folder, next(iter(process.stdout)).strip(), command, env)
        finally:
            process.kill()


def killed_twice(stage: Stage) -> None:
    """Kill the first life after two turns and the second after one more; the third comes to its end."""
    stage.life(killed_after=2)
    for life, killed_after in enumerate([1, None]):
        known = stage.recorded()
        assert known >= 2 + life
        lines = stage.life(killed_after=killed_after)
    assert stage.sampled() - stage.before == TURNS - known
    requests, turns = lines[-2].split(), lines[-1].split()
    assert int(requests[1]) == TURNS - known
    assert int(requests[3]) == (known if stage.command is None else 1)
    assert turns == ["turns", str(TURNS), "rows", "1", "wasted", "0"]
    assert stage.recorded() == 0


def test_a_generate_function_goes_on_where_it_was_killed(tmp_path):
    with open_stage(tmp_path, None, None, {}) as stage:
        killed_twice(stage)


def test_an_unmodified_agent_goes_on_where_it_was_killed(tmp_path):
    """A program in a sandbox that knows the gateway's URL and nothing else."""
    command = [sys.executable, str(Path(__file__).with_name("simple_agent.py")), "Take all steps."]
    with open_stage(tmp_path, script(SAYS_THE_END), command, {"PATH": PATH}) as stage:
        killed_twice(stage)


@pytest.mark.agents
def test_mini_swe_agent_goes_on_where_it_was_killed(tmp_path):
    if not MINI.exists():
        pytest.skip("mini-swe-agent is not installed")
    command = [str(MINI), "-m", "openai/policy", "-t", "Take all steps.", "-y", "--exit-immediately"]
    env = {
        "PATH": f"{MINI.parent}:{PATH}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    with open_stage(tmp_path, script(SUBMITS), command, env) as stage:
        killed_twice(stage)
