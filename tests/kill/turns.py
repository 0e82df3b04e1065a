"""The account of every turn that was sampled, over all lives of one ledger: none twice for a sample that is on disk (P11).

The servers outlive the engines that are killed and note each request; the engines say what begins, ends and is written. So a
turn that was sampled twice is explained: its sample was in flight at a kill, it was finished and not yet written, or its try
had failed.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import attrs

Sample: TypeAlias = tuple[str, int]
"""A group's id as text, and the sample's index."""
IN_FLIGHT, UNWRITTEN, FAILED = "twice: in flight", "twice: unwritten", "twice: failed before"
WRITTEN = "samples written before their group"


@attrs.define(eq=False, kw_only=True)
class Turns:
    """One ledger. ``life`` is the number of its next life; ``end_life`` closes the account of one.

    Lives of other ledgers have other numbers, and are in the same notes.
    """

    notes: Path
    max_running: int
    life: int
    counts: Counter[str] = attrs.field(factory=Counter)
    problems: list[str] = attrs.field(factory=list)
    _under_way: set[Sample] = attrs.field(factory=set, init=False)
    _finished: dict[Sample, int] = attrs.field(factory=dict, init=False)
    """The tries that finished in this life."""
    _recorded: set[Sample] = attrs.field(factory=set, init=False)
    """The samples of which this or an earlier life heard that they are on disk."""
    _on_disk_since: dict[Sample, int] = attrs.field(factory=dict, init=False)
    _cut: dict[int, dict[Sample, str]] = attrs.field(factory=dict, init=False)
    """By life, the samples that the kill cost, and why."""
    _sampled_in: dict[tuple[Sample, int], int] = attrs.field(factory=dict, init=False)
    _read: int = attrs.field(default=0, init=False)

    def read(self, word: str, group: str, index: str, number: str = "0") -> None:
        """Note what a life said about a sample: began, over, finished or recorded."""
        sample = group, int(index)
        match word:
            case "began":
                self._under_way.add(sample)
                if sample in self._finished:
                    self.problems.append(f"sample {sample} was finished, and try {number} began in the same life")
            case "over":
                self._under_way.discard(sample)
            case "finished":
                self._finished[sample] = int(number)
            case "recorded":
                self._recorded.add(sample)
                self.counts[WRITTEN] += 1

    def end_life(self, on_disk: Iterable[Sample]) -> None:
        """Compare a life that has ended with the ledger and with the servers' notes. ``on_disk``: settled groups' samples too."""
        stored = set(on_disk)
        for what, lost in (
            ("written samples are not on disk", self._recorded - stored),
            ("samples were on disk and are not any more", self._on_disk_since.keys() - stored),
        ):
            if lost:
                self.problems.append(f"{what}: {sorted(lost)}")
        if len(self._under_way) > self.max_running:
            self.problems.append(f"{len(self._under_way)} samples were under way, in {self.max_running} slots")
        unwritten = dict.fromkeys(self._finished.keys() - stored, UNWRITTEN)
        self._cut[self.life] = {**dict.fromkeys(self._under_way - stored, IN_FLIGHT), **unwritten}
        for sample in stored - self._on_disk_since.keys():
            self._on_disk_since[sample] = self.life
        self._check_notes()
        self._under_way.clear()
        self._finished.clear()
        self.life += 1

    def _check_notes(self) -> None:
        lines = self.notes.read_text("utf-8").splitlines() if self.notes.exists() else []
        for line in lines[self._read :]:
            number, group, index, _, turn, end = line.split()
            life, sample = int(number), (group, int(index))
            if life not in self._cut:
                continue  # of another ledger
            if life > self._on_disk_since.get(sample, life):
                self.problems.append(f"sample {sample} was on disk and was sampled again: {line}")
            if end == "sampled":
                self._count((sample, int(turn)), life)
        self._read = len(lines)

    def _count(self, turn: tuple[Sample, int], life: int) -> None:
        before = self._sampled_in.get(turn, life)
        if before < life:
            self.counts[self._cut[before].get(turn[0], FAILED)] += 1
        self._sampled_in[turn] = max(before, life)
        self.counts["turns"] += 1
