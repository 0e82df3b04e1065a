"""Live, be killed, be looked at: so many times, over one ledger after the other."""

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from .belief import Belief
from .child import SAMPLES, SETTINGS, Orders
from .servers import ROOT, observed_server
from .turns import Turns

PROMPTS, EPOCHS = 40, 2
LONGEST_S, AT_MOST_S = 1.4, 8.0
"""The longest life: on a quiet machine, and on one so busy that shorter ones come to nothing."""


@attrs.define(eq=False)
class Nest:
    """The process that makes lives."""

    process: "subprocess.Popen[str]"

    def live(self, orders: Orders) -> Iterator[str]:
        """One life, to its end: its lines, at last ``ended STATUS``."""
        if self.process.stdin is None or self.process.stdout is None:
            raise AssertionError("pipes were asked for")
        self.process.stdin.write(json.dumps(attrs.asdict(orders)) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            yield line
            if line.startswith("ended"):
                return
        raise AssertionError("the process that makes lives has ended")


@contextmanager
def open_nest() -> Generator[Nest]:
    """A nest; it ends when this is left."""
    command = [sys.executable, "-m", "tests.kill.child"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Nest(process)
        finally:
            process.kill()


@attrs.define(eq=False, kw_only=True)
class Cycles:
    """Kill cycles of one seed. A ledger lasts until its data has ended, then there is a new one."""

    folder: Path
    notes: Path
    seed: int
    urls: tuple[str, ...]
    counts: Counter[str] = attrs.field(factory=Counter)
    problems: list[str] = attrs.field(factory=list)
    _lives: int = attrs.field(default=0, init=False)
    _longest_s: float = attrs.field(default=LONGEST_S, init=False)
    _rng: random.Random = attrs.field(init=False)
    _belief: Belief = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        lines = [json.dumps({"prompt": f"what is {number}", "label": str(number)}) for number in range(PROMPTS)]
        (self.folder / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
        self._begin()

    def run(self, nest: Nest, cycles: int) -> None:
        """Kill so many lives, or fewer if something is wrong; then let the last ledger's run come to its end."""
        while self.counts["cycles"] < cycles and not self.problems:
            before = self._belief.counts["deliveries"]
            status = self._live(nest, self._rng.uniform(0, self._longest_s))
            came_to_nothing = self._belief.counts["deliveries"] == before
            self._longest_s *= 1.15 if came_to_nothing else 0.9
            self._longest_s = min(max(self._longest_s, LONGEST_S), AT_MOST_S)
            if status == 0:
                self._end()
                self._begin()
        if not self.problems and self._live(nest, None) != 0:
            self.problems.append("the last life failed")
        self._end()

    def _begin(self) -> None:
        number = self.counts["ledgers"]
        self.counts["ledgers"] += 1
        self._belief = Belief(
            path=self.folder / f"ledger-{number}",
            prompts=PROMPTS,
            epochs=EPOCHS,
            samples=SAMPLES,
            keep=number % 2 == 0,
            turns=Turns(notes=self.notes, max_running=SETTINGS.max_running, life=self._lives),
        )

    def _live(self, nest: Nest, seconds: float | None) -> int:
        belief, status = self._belief, ""
        for line in nest.live(self._orders(seconds)):
            if line.startswith("ended"):
                status = line.split()[1]
            else:
                belief.read(line)
        if status == "-9":
            self.counts["cycles"] += 1
        elif status != "0":
            belief.problems.append(f"a life of {belief.path} ended with status {status}")
        belief.check()
        self.problems += belief.problems
        belief.problems.clear()
        return int(status)

    def _orders(self, seconds: float | None) -> Orders:
        belief = self._belief
        self._lives += 1
        return Orders(
            ledger=str(belief.path),
            prompts=str(self.folder / "prompts.jsonl"),
            checkpoint=str(belief.path.with_suffix(".json")),
            urls=self.urls,
            epochs=EPOCHS,
            keep=belief.keep,
            seed=self._rng.getrandbits(32),
            life=belief.turns.life,
            seconds=seconds,
        )

    def _end(self) -> None:
        if not self.problems:
            self._belief.check_end()
            self.problems += self._belief.problems
        self.counts.update(self._belief.counts)
        self.counts.update(self._belief.turns.counts)


def run_cycles(folder: Path, *, cycles: int, seed: int, servers: int = 2) -> Cycles:
    """Kill so many lives on tiny servers that outlive them."""
    with ExitStack() as stack:
        nest = stack.enter_context(open_nest())
        notes = folder / "notes"
        urls = [stack.enter_context(observed_server(0.003, notes)) for _ in range(servers)]
        found = Cycles(folder=folder, notes=notes, seed=seed, urls=tuple(urls))
        found.run(nest, cycles)
    return found
