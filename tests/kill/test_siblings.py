"""kill -9 while most samples of every group are finished: what is on disk is not sampled again (P11).

The rule: a finished sample is written 0.2 s after it finished at the latest, with all others of that time in one transaction. So
a kill costs what was under way, and what had finished in the 0.2 s before and in the transaction's time.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest

from .cycles import ROOT
from .siblings import EARLY, GROUPS, HANGS_AT, LAST, SAMPLES, TURNS


@attrs.frozen
class Life:
    """One life: its exit status, the turns that its server was asked for, the samples that it wrote."""

    status: int
    turns: Counter[tuple[int, ...]]
    written: set[tuple[int, ...]]

    @property
    def samples(self) -> set[tuple[int, ...]]:
        """The samples that the server was asked for."""
        return {turn[:2] for turn in self.turns}


def live(ledger: Path, moment: str) -> Life:
    """Run one life to its end."""
    command = [sys.executable, "-m", "tests.kill.siblings", str(ledger), moment]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    said = [line.split() for line in done.stdout.splitlines()]
    numbers = {word: [tuple(map(int, rest)) for first, *rest in said if first == word] for word in ("turn", "written")}
    return Life(done.returncode, Counter(numbers["turn"]), set(numbers["written"]))


def everywhere(*indices: int) -> set[tuple[int, int]]:
    """The samples of these indices, of every group."""
    return {(group, index) for group in range(GROUPS) for index in indices}


@pytest.mark.parametrize(
    ("moment", "on_disk"),
    [("written", range(LAST)), ("lingering", range(EARLY))],
)
def test_f103_kill_9_costs_what_was_in_flight_and_what_was_not_written_yet(tmp_path, moment, on_disk):
    first = live(tmp_path / "ledger", moment)
    assert first.status == -9
    assert first.written == everywhere(*on_disk)
    assert first.samples == everywhere(*range(SAMPLES))

    second = live(tmp_path / "ledger", "never")

    assert second.status == 0
    missing = [index for index in range(SAMPLES) if index not in on_disk]
    assert second.samples == everywhere(*missing), "what is on disk is never sampled again"
    assert second.turns == Counter((*sample, number) for sample in everywhere(*missing) for number in range(TURNS))
    twice = first.turns & second.turns
    in_flight = sum(count for turn, count in twice.items() if turn[:2] in everywhere(LAST))
    assert in_flight <= GROUPS * HANGS_AT
    assert twice.total() - in_flight <= (GROUPS * (LAST - EARLY) * TURNS if moment == "lingering" else 0)
