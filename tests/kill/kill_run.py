"""``python -m tests.kill.kill_run``: kill ``trio-rollout run`` at random until its prompt file is finished, then look.

The server is a tiny one that lives through all of it. Killed means SIGKILL, between ``--at-least`` and ``--at-most``
seconds after the start. Every few lives the folder is exported while the run writes: what was finished then must be
finished, and the same, for ever after. At the end every group must be in the export exactly once, with all its samples.
"""

import hashlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import click

from .servers import COMMAND, tiny_server

WORDS = ("gcd", "lcm", "sum", "product", "maximum")


def write_prompts(path: Path, count: int) -> None:
    """A file of prompts that need no tokenizer."""
    lines = (
        json.dumps({"prompt": f"the {WORDS[number % 5]} of {number} and {number * 7 % 1000} is", "label": str(number)})
        for number in range(count)
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@attrs.define(kw_only=True)
class Folder:
    """The folder of results, and what was seen in it so far: each group's id and a digest of its line."""

    path: Path
    samples: int
    seen: dict[str, str] = attrs.field(factory=dict)
    wrong: list[str] = attrs.field(factory=list)

    def look(self) -> Counter[str]:
        """Export it; note what is lost, changed, there twice or not whole. How often each group is there."""
        done = subprocess.run([*COMMAND, "export", str(self.path)], capture_output=True, check=False)
        if done.returncode:
            self.wrong.append(f"export ended with status {done.returncode}: {done.stderr.decode()[-400:]}")
            return Counter()
        found: Counter[str] = Counter()
        for line in done.stdout.splitlines():
            group = json.loads(line)
            found[group["id"]] += 1
            digest = hashlib.sha256(line).hexdigest()
            if self.seen.setdefault(group["id"], digest) != digest:
                self.wrong.append(f"group {group['id']} is another one than before")
            if len(group["trajectories"]) != self.samples:
                self.wrong.append(f"group {group['id']} has {len(group['trajectories'])} of {self.samples} samples")
        self.wrong += [f"group {gid} was there and is gone" for gid in self.seen.keys() - found.keys()]
        self.wrong += [f"group {gid} is there {times} times" for gid, times in found.items() if times > 1]
        return found


def live(command: list[str], seconds: float) -> int | None:
    """Run the command for at most so long, then kill it. Its exit status; None if it was killed."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return None


@attrs.frozen(kw_only=True)
class Plan:
    """Settings of the run and of its kills."""

    prompts: int
    samples: int
    tokens: int
    max_running: int
    delay: float
    at_least: float
    at_most: float
    look_every: int
    seed: int

    def run(self, folder: Path) -> Folder:
        """Let it live and die until the file is finished; says a line about every look."""
        out, file = Folder(path=folder / "out", samples=self.samples), folder / "prompts.jsonl"
        write_prompts(file, self.prompts)
        rng, start, kills = random.Random(self.seed), time.monotonic(), 0
        with tiny_server(self.delay) as url:
            command = [*COMMAND, "run", "--quiet", *self._options(url, file, out.path)]
            while (status := live(command, rng.uniform(self.at_least, self.at_most))) is None:
                kills += 1
                if kills % self.look_every == 0:
                    found = out.look()
                    click.echo(f"{time.monotonic() - start:6.0f} s  {kills} kills  {len(found)} groups finished")
        found = out.look()
        if status:
            out.wrong.append(f"the last run ended with status {status}")
        missing = self.prompts - len(found)
        if missing:
            out.wrong.append(f"{missing} of {self.prompts} groups are missing")
        click.echo(
            f"finished after {time.monotonic() - start:.0f} s and {kills} kills: {len(found)} groups in the export, "
            f"{sum(found.values())} lines, {missing} missing, {len(out.wrong)} problems"
        )
        return out

    def _options(self, url: str, file: Path, out: Path) -> list[str]:
        named = {
            "server": url,
            "prompts": file,
            "out": out,
            "samples": self.samples,
            "max-new-tokens": self.tokens,
            "max-running": self.max_running,
            "reward": "regex:.",
        }
        return [word for name, value in named.items() for word in (f"--{name}", str(value))]


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--prompts", type=click.IntRange(1), default=3000, help="Prompts in the file.")
@click.option("--samples", type=click.IntRange(1), default=4, help="Samples of each.")
@click.option("--tokens", type=click.IntRange(1), default=32, help="Tokens of each sample.")
@click.option("--max-running", type=click.IntRange(1), default=32, help="Rollouts at once.")
@click.option("--delay", type=click.FloatRange(0), default=0.05, help="Seconds for each token.")
@click.option("--at-least", type=click.FloatRange(0), default=5.0, help="Shortest life in seconds.")
@click.option("--at-most", type=click.FloatRange(0), default=15.0, help="Longest life in seconds.")
@click.option("--look-every", type=click.IntRange(1), default=10, help="Lives between two exports.")
@click.option("--seed", type=int, default=0, help="Of the kills.")
def main(**options: float) -> None:
    """Make the run and say how it went."""
    with TemporaryDirectory(prefix="kill-run-") as folder:
        problems = Plan(**options).run(Path(folder)).wrong  # type: ignore[arg-type]  click checked them
    for problem in problems[:20]:
        click.echo(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
