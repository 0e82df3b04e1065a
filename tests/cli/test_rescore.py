"""``trio-rollout rescore`` and ``run --retry-quarantined``, in separate processes, as a user runs them."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import apsw
import attrs
import pytest
from click.testing import CliRunner

from trio_rollout.cli import main
from trio_rollout.ledger import read_ledger

from ._commands import COMMAND, Ended, Started, command, tiny_server, write_jsonl

SCRIPT = {"rules": [{"matches": "say (\\w+)", "answer": "{1}"}]}
REWARDS = """
import os, pathlib, time
from trio_rollout import in_process

HERE = pathlib.Path(__file__).parent

def note(trajectory):
    with open(HERE / "calls", "a") as calls:
        calls.write(f"{trajectory.prompt.id}.{trajectory.index}\\n")

def broken(trajectory):
    note(trajectory)
    if not (HERE / "mended").exists() and trajectory.prompt.label == "odd":
        raise KeyError("no such key")
    return 1.0

async def half(trajectory):
    note(trajectory)
    return 0.5

def slow(trajectory):
    note(trajectory)
    time.sleep(0.3)
    return 0.25

def waits(trajectory):
    note(trajectory)
    while not (HERE / "mended").exists():
        time.sleep(0.05)
    return 1.0

def length(trajectory):
    return float(len(trajectory.text))

elsewhere = in_process(length)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a tiny server that says what it is asked to."""
    script = tmp_path_factory.mktemp("server") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    with tiny_server("--script", script) as (url, _):
        yield url


@attrs.define
class Place:
    """A folder with rewards, prompts and results, in which commands are run."""

    path: Path
    server: str

    def write(self, count, odd=()):
        """Write the prompts; those at ``odd`` have a label that the reward ``broken`` fails for."""
        items = [{"prompt": f"say {n}", "label": "odd" if n in odd else "even"} for n in range(count)]
        write_jsonl(self.path / "prompts.jsonl", items)

    def run(self, *arguments, reward="rewards:broken"):
        common = ("--prompts", "prompts.jsonl", "--out", "out", "--samples", 2, "--server", self.server)
        return command("run", *common, "--reward", reward, *arguments, cwd=self.path)

    def rescore(self, *arguments):
        return command("rescore", "out", *arguments, cwd=self.path)

    @contextmanager
    def rescoring(self, *arguments):
        """Run it in the background, in a separate process group; kill that on leaving."""
        with subprocess.Popen(
            [*COMMAND, "rescore", "out", *map(str, arguments)],
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield Started(process)
            finally:
                process.kill()

    def calls(self):
        """Return the samples that were scored since the last call, and how often."""
        file = self.path / "calls"
        found = Counter(file.read_text().split() if file.exists() else ())
        file.unlink(missing_ok=True)
        return found

    def until_calls(self, count):
        """Wait until so many samples were begun to be scored."""
        file = self.path / "calls"
        until_s = time.monotonic() + 60
        while not file.exists() or len(file.read_text().split()) < count:
            assert time.monotonic() < until_s
            os.sched_yield()

    def rewards(self):
        """Return the state and the rewards of each group."""
        with read_ledger(self.path / "out") as reader:
            return {one.id.prompt: (one.state.value, *one.rewards) for one in reader.summaries()}

    def written(self):
        """Return the groups that have the reward of ``slow``."""
        return {name for name, (_, *rewards) in self.rewards().items() if rewards == [0.25, 0.25]}


@pytest.fixture
def place(tmp_path, server):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return Place(tmp_path, server)


def has(ended: Ended, name: str, value: object) -> bool:
    """Return True if the summary has this row."""
    return any(line.replace("│", " ").split() == [*name.split(), str(value)] for line in ended.lines)


def exported(path):
    result = CliRunner().invoke(main, ["export", str(path / "out"), "--format", "jsonl"])
    assert result.exit_code == 0, result.output
    groups = [json.loads(line) for line in result.stdout.splitlines()]
    return {group["prompt"]["id"]: [row["reward"] for row in group["trajectories"]] for group in groups}


def test_what_is_stored_gets_new_rewards_and_a_group_that_only_lacked_scores_is_in_the_next_run(place):
    """F105: tokens of a scorer that failed are scored again; finished groups get new rewards and are not run again."""
    place.write(4, odd=[1])
    first = place.run("--max-running", 2)
    assert first.status == 3, first.out + first.err
    assert place.rewards()["1"] == ("quarantined",)
    place.calls()

    ended = place.rescore("--reward", "rewards:half")

    assert ended.status in {0, 3}, ended.out + ended.err
    whole = place.rewards()["1"][0] == "ready"
    assert has(ended, "groups scored", 4)
    assert has(ended, "now ready", int(whole))
    assert has(ended, "mean reward", "0.5000")
    assert set(place.calls().values()) == {1}
    assert {name: rewards for name, (_, *rewards) in place.rewards().items() if rewards} == {
        name: [0.5, 0.5] for name in ("0", "2", "3", *(["1"] if whole else []))
    }
    old = place.run()
    assert (old.status, "its reward is 'rewards:half', this run's is 'rewards:broken'" in old.err) == (1, True), old.err
    new = place.run("--retry-quarantined", reward="rewards:half")
    assert new.status == 0, new.out + new.err
    assert has(new, "rollouts in this run", 0 if whole else 1)
    assert any("groups scored" in line and "4 of 4" in line for line in new.lines)
    assert exported(place.path) == {str(n): [0.5, 0.5] for n in range(4)}


def test_the_default_is_the_folders_own_reward_mended_in_its_place(place):
    place.write(3, odd=[0, 2])
    assert place.run().status == 3
    place.calls()
    (place.path / "mended").touch()

    ended = place.rescore("--state", "quarantined")

    assert ended.status == 0, ended.out + ended.err
    assert {name.split(".")[0] for name in place.calls()} == {"0", "2"}
    again = place.run("--retry-quarantined")
    assert again.status == 0, again.out + again.err
    assert exported(place.path) == {str(n): [1.0, 1.0] for n in range(3)}


def test_a_finished_group_that_can_not_be_scored_is_listed_and_only_that_one_is_scored_next_time(place):
    place.write(5, odd=[1, 3])
    assert place.run(reward="rewards:half").status == 0
    place.calls()

    ended = place.rescore("--reward", "rewards:broken")

    assert ended.status == 3, ended.out + ended.err
    assert re.search(r"failed for 2 groups: KeyError: 'no such key': 0/[13] \(acked\), 0/[13] \(acked\)", ended.out)
    assert exported(place.path) == {"0": [1, 1], "1": [0.5, 0.5], "2": [1, 1], "3": [0.5, 0.5], "4": [1, 1]}
    refused = place.run(reward="rewards:broken")
    assert refused.status == 1
    assert "is being scored again with 'rewards:broken'" in refused.err
    assert "trio-rollout rescore out --reward rewards:broken" in refused.err
    shown = CliRunner().invoke(main, ["inspect", str(place.path / "out")])
    assert "scoring again with rewards:broken is not complete" in shown.output
    place.calls()
    (place.path / "mended").touch()

    ended = place.rescore("--reward", "rewards:broken")

    assert ended.status == 0, ended.out + ended.err
    assert place.calls() == Counter(["1.0", "1.1", "3.0", "3.1"])
    assert has(ended, "skipped: scored before the interruption", 3)
    assert exported(place.path) == {str(n): [1, 1] for n in range(5)}
    assert place.run(reward="rewards:broken").status == 0


@pytest.mark.parametrize("end", ["ctrl-c", "SIGTERM", "kill -9"])
def test_interrupted_in_the_middle_it_goes_on_and_scores_no_group_twice(place, end):
    place.write(8)
    assert place.run(reward="rewards:half").status == 0
    place.calls()

    with place.rescoring("--reward", "rewards:slow", "--max-running", 2) as running:
        place.until_calls(5)
        if end == "ctrl-c":
            running.ctrl_c()
        else:
            running.signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
        ended = running.end()

    assert ended.status == (-9 if end == "kill -9" else 130), ended.out + ended.err
    if end != "kill -9":
        assert "interrupted: run the same command again to go on" in ended.out
    before, first = place.written(), place.calls()
    assert 0 < len(before) < 8
    assert all(rewards in ([0.5, 0.5], [0.25, 0.25]) for _, *rewards in place.rewards().values())
    refused = place.run(reward="rewards:slow")
    assert (refused.status, "is being scored again" in refused.err) == (1, True), refused.err

    ended = place.rescore("--reward", "rewards:slow")

    assert ended.status == 0, ended.out + ended.err
    assert {name.split(".")[0] for name in place.calls()} == {str(n) for n in range(8)} - before
    assert max(first.values()) == 1
    assert place.written() == {str(n) for n in range(8)}
    assert place.rescore("--reward", "rewards:slow", "--again").status == 0
    assert len(place.calls()) == 16


def test_while_another_process_has_the_folder_open_it_is_refused(place):
    place.write(3)
    assert place.run(reward="rewards:half").status == 0
    place.calls()
    with place.rescoring("--reward", "rewards:waits", "--max-running", 2) as running:
        place.until_calls(1)
        for refused in (place.rescore("--reward", "rewards:half"), place.run(reward="rewards:half")):
            assert refused.status == 1
            assert f"is in use by process {running.process.pid}" in refused.err
        (place.path / "mended").touch()
        assert running.end().status == 0


@pytest.mark.parametrize("reward", ["rewards:length", "rewards:elsewhere", "regex:(even|odd|.)", "exact_match"])
def test_it_takes_every_reward_that_run_takes(place, reward):
    place.write(2)
    assert place.run(reward="rewards:half").status == 0

    ended = place.rescore("--reward", reward, "--quiet")

    assert (ended.status, ended.out) == (0, ""), ended.err
    assert exported(place.path) == dict.fromkeys("01", [1.0, 1.0] if reward.startswith("rewards") else [0.0, 0.0])


def test_generated_tasks_are_scored_again_by_their_own_verifier(tmp_path, server):
    common = ("--tasks", "gcd:2", "--samples", 1, "--server", server, "--max-new-tokens", 4, "--out", "out")
    assert command("run", *common, cwd=tmp_path).status == 0

    ended = command("rescore", "out", cwd=tmp_path)

    assert (ended.status, has(ended, "groups scored", 2)) == (0, True), ended.out + ended.err
    assert command("run", *common, cwd=tmp_path).status == 0


def test_a_scorer_has_its_time_and_its_tries(place):
    place.write(1)
    assert place.run(reward="rewards:half").status == 0
    place.calls()

    limits = ("--reward-deadline", "0.2", "--max-attempts", "1")
    ended = place.rescore("--reward", "rewards:waits", *limits)
    (place.path / "mended").touch()  # its threads end

    assert ended.status == 3, ended.out + ended.err
    assert "no answer within its deadline of 0.2 s" in ended.out
    assert set(place.calls().values()) == {1}


def test_wrong_uses_say_what_is_wrong(place):
    place.write(2)
    assert place.run(reward="rewards:half").status == 0
    for arguments, status, words in (
        (("--reward", "rewards:gone"), 2, "has no 'gone'"),
        (("--reward", "rewards:slow", "--state", "acked"), 1, "it would hold two kinds"),
        (("--state", "filtered"), 2, "'filtered' is not one of"),
        (("--max-running", "0"), 2, "0 is not in the range"),
    ):
        ended = place.rescore(*arguments)
        assert (ended.status, words in ended.err) == (status, True), ended.err
    ended = command("rescore", "nothing", "--reward", "exact_match", cwd=place.path)
    assert (ended.status, "is no ledger" in ended.err) == (1, True), ended.err
    assert exported(place.path) == {"0": [0.5, 0.5], "1": [0.5, 0.5]}


@pytest.mark.parametrize("old", [1, 2])
def test_a_folder_of_an_older_format_is_brought_up_to_date(tmp_path, old):
    stored = Path(__file__).parents[1] / "ledger" / f"format_{old}"
    db = apsw.Connection(str(tmp_path / "ledger.db"))
    db.execute((stored / "ledger.sql").read_text())
    db.close()
    for segment in stored.glob("*.seg"):
        (tmp_path / segment.name).write_bytes(segment.read_bytes())

    (tmp_path / "rewards.py").write_text(REWARDS)

    ended = command("rescore", tmp_path, "--reward", "rewards:half", cwd=tmp_path)

    assert ended.status == 0, ended.out + ended.err
    with read_ledger(tmp_path) as reader:
        rewards = {reward for one in reader.summaries() for reward in one.rewards}
    assert rewards == {0.5}


@pytest.mark.parametrize("way", ["option", "TOML"])
def test_quarantined_groups_are_tried_again_on_request(place, way):
    """With new tries, and also where nothing else is left to do; failing once more they are quarantined again."""
    place.write(4, odd=[1, 2])
    assert place.run().status == 3
    assert place.run().status == 3
    (place.path / "run.toml").write_text("retry_quarantined = true\n")
    again = ("--config", "run.toml") if way == "TOML" else ("--retry-quarantined",)
    place.calls()

    ended = place.run(*again)

    assert ended.status == 3, ended.out + ended.err
    assert {name.split(".")[0] for name in place.calls()} == {"1", "2"}
    (place.path / "mended").touch()
    ended = place.run(*again)
    assert ended.status == 0, ended.out + ended.err
    assert exported(place.path) == {str(n): [1.0, 1.0] for n in range(4)}
