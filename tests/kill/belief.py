"""The conditions that a ledger must meet after a kill, given the words of all its lives (P7, P8)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs

from trio_rollout._core.lifecycle import State
from trio_rollout._core.values import GroupId
from trio_rollout.errors import LedgerError
from trio_rollout.ledger import GroupSummary, LedgerReader, read_ledger
from trio_rollout.ledger._codec import encode_group

from .child import is_dull
from .turns import Sample, Turns

LOST, AGAIN, UNSETTLED = "acked groups lost", "acked groups seen again", "unsettled prompts lost"
ENDS = frozenset({State.ACKED, State.FILTERED, State.QUARANTINED})


@attrs.define(eq=False, kw_only=True)
class Belief:
    """One ledger. A group goes by its place in the source's order, which is that of the file, epoch by epoch."""

    path: Path
    prompts: int
    epochs: int
    samples: int
    keep: bool
    turns: Turns
    acked: set[int] = attrs.field(factory=set)
    acking: set[int] = attrs.field(factory=set)
    offered: set[int] = attrs.field(factory=set)
    """By this life."""
    is_new: bool = True
    """True while this life has neither taken a batch nor restored."""
    delivered: dict[int, int] = attrs.field(factory=dict)
    """By earlier lives and not acked, with the step."""
    pulled: int = 0
    ended: dict[int, State] = attrs.field(factory=dict)
    attempts: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    bodies: dict[int, int] = attrs.field(factory=dict)
    counts: Counter[str] = attrs.field(factory=Counter)
    problems: list[str] = attrs.field(factory=list)

    def read(self, line: str) -> None:
        """Note a line that a life printed."""
        word, *rest = line.split()
        match word:
            case "opened":
                self.counts[word] += 1
                self.offered.clear()  # the first change of hands takes earlier deliveries back
                self.is_new = True
            case "offered":
                self.is_new = False
                self.counts["deliveries"] += len(rest) - 1
                places = {self.place(text) for text in rest[1:]}
                self.note(AGAIN, self.acked & places)
                self.offered |= places
            case "restoring":
                self.offered.clear()  # they are ready again, or will be
                if self.is_new:  # what an earlier life delivered up to this step is acked by it (decision 57)
                    self.acking = {place for place, step in self.delivered.items() if step <= int(rest[0])}
            case "restored":
                self.counts[word] += 1
                self.is_new = False
                self.acked |= self.acking
                self.acking = set()
            case "acking":
                self.acking = {self.place(text) for text in rest[1:]}
            case "acked":
                self.acked |= {self.place(text) for text in rest}
                self.acking = set()
            case "began" | "over" | "finished" | "recorded":
                self.turns.read(word, *rest)
            case "updated" | "end":
                self.counts[word] += 1
            case _:
                self.problems.append(f"a life said {line!r}")

    def place(self, text: str) -> int:
        """Of a group's id as text."""
        epoch, _, number = text.partition("/")
        return int(epoch) * self.prompts + int(number)

    def note(self, what: str, places: set[int]) -> None:
        """A problem, if there are any such groups."""
        if places:
            self.problems.append(f"{what}: {sorted(places)}")
            self.counts[what] += len(places)

    def check(self) -> None:
        """Compare the ledger with what was said and with what it was at the last check."""
        on_disk: set[Sample] = set()
        try:
            on_disk = self._check()
        except LedgerError as error:
            if self.pulled:  # else the first life was killed while it made the ledger
                self.problems.append(f"the ledger can't be read: {error}")
        self.turns.end_life(on_disk)
        self.problems += self.turns.problems
        self.turns.problems.clear()

    def _check(self) -> set[Sample]:
        """Check the groups, and return the samples that the ledger has."""
        with read_ledger(self.path) as reader:
            rows = {self._place_of(one.id): one for one in reader.summaries()}
            self._check_counts(rows, reader.counts())
            self._check_bodies(rows, reader)
            on_disk = set(self._on_disk(rows, reader))
        self._check_rows(rows)
        self.delivered = {
            place: one.step for place, one in rows.items() if one.state is State.DELIVERED and one.step is not None
        }
        return on_disk

    def _on_disk(self, rows: dict[int, GroupSummary], reader: LedgerReader) -> Iterator[Sample]:
        """Yield the finished samples of unfinished groups, and all samples of the others that were pulled."""
        for place in range(self.pulled):
            epoch, number = divmod(place, self.prompts)
            row, gid = rows.get(place), GroupId(epoch, str(number))
            if row is not None and row.state in {State.WAITING, State.QUARANTINED}:
                yield from ((str(gid), trajectory.index) for trajectory in reader.samples(gid).kept)
            else:
                yield from ((str(gid), index) for index in range(self.samples))

    def check_end(self) -> None:
        """At the end of the data every group was trained, filtered or given up."""
        with read_ledger(self.path) as reader:
            undone = {self._place_of(one.id) for one in reader.summaries() if one.state not in ENDS}
        self.note(UNSETTLED, undone | set(range(self.pulled, self.prompts * self.epochs)))

    def _place_of(self, gid: GroupId) -> int:
        return gid.epoch * self.prompts + int(gid.prompt)

    def _check_counts(self, rows: dict[int, GroupSummary], counts: dict[State, int]) -> None:
        """Nothing that was pulled is missing: the pulls are the source's first ones."""
        stood = {place for place, one in rows.items() if one.state is State.ACKED}
        acked = stood if self.keep else (self.acked | self.acking) - rows.keys()
        self.note(LOST, self.acked - acked)
        self.note("acked without being asked", acked - self.acked - self.acking)
        pulled = len(rows) if self.keep else len(rows) + counts[State.ACKED] + counts[State.FILTERED]
        filtered = {place for place in range(pulled) if is_dull(place % self.prompts)} - rows.keys()
        gone = set() if self.keep else acked | filtered
        self.note(UNSETTLED, set(range(max(pulled, self.pulled))) - rows.keys() - gone)
        if len(acked) != counts[State.ACKED]:
            self.problems.append(f"{counts[State.ACKED]} groups count as acked, {len(acked)} are")
        self.counts["acks"] = len(acked)
        self.acked, self.acking, self.pulled = acked, set(), pulled

    def _check_rows(self, rows: dict[int, GroupSummary]) -> None:
        """Check that ended groups stay ended, attempts are remembered, and no finished group begins again."""
        for place, one in rows.items():
            if self.ended.get(place, one.state) is not one.state:
                self.problems.append(f"group {place} was {self.ended[place]} and is {one.state}")
            if one.state in ENDS:
                self.ended[place] = one.state
            now = one.attempt, one.attempts
            before = self.attempts.get(place, (0, 0))
            if now < before:
                self.problems.append(f"group {place}: attempts were {before} and are {now}")
            self.attempts[place] = now
            if place in self.bodies and one.state in {State.WAITING, State.QUARANTINED}:
                self.problems.append(f"group {place} was finished and is {one.state}")
            if place in self.offered and one.state not in {State.DELIVERED, State.ACKED}:
                self.problems.append(f"group {place} was offered and is {one.state}")

    def _check_bodies(self, rows: dict[int, GroupSummary], reader: LedgerReader) -> None:
        """A group is committed once: what it was when it was finished it stays."""
        for _, group in reader.groups():
            place = self._place_of(group.id)
            digest = hash(encode_group(group))
            if self.bodies.setdefault(place, digest) != digest:
                self.problems.append(f"group {place} is not the one that was committed")
        self.counts["commits"] = len(self.bodies)
        if missing := {place for place, one in rows.items() if one.newest_version is not None} - self.bodies.keys():
            self.problems.append(f"finished groups without a body: {sorted(missing)}")
