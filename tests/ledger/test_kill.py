"""kill -9 at any moment: every confirmed write is on disk, and at most the one that was being made (P7)."""

import random
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import pytest

from trio_rollout._core.lifecycle import State
from trio_rollout._core.values import Trajectory
from trio_rollout.ledger import read_ledger

from ._samples import gid, group, sample
from .killed_child import size_of

ROOT = Path(__file__).parents[2]
Standing = tuple[str, int]


@attrs.define(eq=False)
class Belief:
    """For each group, the last state that a process was told, and the state that it was writing when it died.

    ``sampled`` and ``sampling``: in the same way, the attempt of the group's sample.
    """

    told: dict[int, Standing] = attrs.field(factory=dict)
    tried: dict[int, Standing] = attrs.field(factory=dict)
    sampled: dict[int, int] = attrs.field(factory=dict)
    sampling: dict[int, int] = attrs.field(factory=dict)

    def read(self, line: str) -> None:
        mark, number, state, attempt = line.split()
        if state == "kept":
            (self.sampling if mark == ">" else self.sampled)[int(number)] = int(attempt)
        else:
            (self.tried if mark == ">" else self.told)[int(number)] = state, int(attempt)

    def check(self, path: Path, *, keep: bool) -> None:
        """Check that the ledger agrees, read-only, and that its bodies are those that were written."""
        with read_ledger(path) as reader:
            found = {int(one.id.prompt): (one.state.value, one.attempt) for one in reader.summaries()}
            for number, trying in self.tried.items():
                told = self.told.get(number)
                gone = not keep and "acked" in {trying[0], told and told[0]}
                assert found.get(number) in {told, trying, None if gone else told}, number
                if number in found:
                    self.told[number] = found[number]
            assert set(found) <= set(self.tried)
            for state, body in reader.groups(State.READY, State.DELIVERED):
                number = int(body.id.prompt)
                assert body == group(number, body.attempt, size=size_of(number))
                assert found[number] == (state.value, body.attempt)
            for number, (name, _) in found.items():
                self._check_sample(number, name, reader.samples(gid(number)).kept)

    def _check_sample(self, number: int, state: str, kept: tuple[Trajectory, ...]) -> None:
        """Check that a waiting group has the sample that was told or the one that was being written, and others none."""
        possible = {self.sampled.get(number), self.sampling.get(number)} if state == "waiting" else {None}
        attempts = {attempt for attempt in possible if kept == _kept(number, attempt)}
        assert attempts, (number, state)
        if attempts != {None}:
            (self.sampled[number],) = attempts


def _kept(number: int, attempt: int | None) -> tuple[Trajectory, ...]:
    return () if attempt is None else (sample(number, 0, attempt, size=size_of(number)),)


def live_and_die(path: Path, seed: int, seconds: float, belief: Belief, *, keep: bool) -> int:
    """Run the child and kill it so many seconds after its first line; return the number of its lines."""
    command = [sys.executable, "-m", "tests.ledger.killed_child", str(path), str(seed), "keep" if keep else "drop"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        killer = threading.Timer(seconds, child.kill)
        killer.start()
        lines += child.stdout.readlines()
        killer.join()
    for line in lines:
        if line.endswith("\n"):
            belief.read(line)
    return len(lines)


def cycles(path: Path, count: int, *, keep: bool) -> None:
    rng = random.Random(3)
    belief = Belief()
    lines = 0
    for seed in range(count):
        lines += live_and_die(path, seed, rng.uniform(0.01, 0.4), belief, keep=keep)
        belief.check(path, keep=keep)
    assert lines > count * 2  # on a busy machine a life is short of time, and a check that sees nothing proves nothing


@pytest.mark.parametrize("keep", [True, False])
def test_a_killed_process_loses_nothing_it_was_told(tmp_path: Path, keep: bool):  # ruff: ignore[boolean-type-hint-positional-argument]
    cycles(tmp_path / "ledger", 2, keep=keep)


@pytest.mark.soak
@pytest.mark.parametrize("keep", [True, False])
def test_processes_killed_a_hundred_times_lose_nothing(tmp_path: Path, keep: bool):  # ruff: ignore[boolean-type-hint-positional-argument]
    cycles(tmp_path / "ledger", 100, keep=keep)
