"""The command line in processes of its own, as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

COMMAND = (sys.executable, "-W", "error::ResourceWarning", "-m", "trio_rollout.cli")
LONGEST_S = 300
"""A command that has not ended by then has hung."""


@attrs.frozen
class Ended:
    """What a command printed and how it ended."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of its output, spaces squeezed."""
        return [" ".join(line.split()) for line in self.out.splitlines()]


def command(*arguments: object, cwd: Path | None = None) -> Ended:
    """Run it to its end."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@attrs.define
class Started:
    """A command that is running; its output is read line by line."""

    process: "subprocess.Popen[str]"
    seen: list[str] = attrs.field(factory=list)

    def read_until(self, pattern: str) -> str:
        """The next line that has a match of the pattern."""
        for line in self.process.stdout or ():
            self.seen.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"the command ended before {pattern!r}: {self.seen}, {self.process.stderr.read()}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def ctrl_c(self) -> None:
        """Do what a terminal does: interrupt it and every process that it started, unless they left its group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> Ended:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=LONGEST_S)
        return Ended(self.process.returncode, "".join(self.seen) + out, err)


@contextmanager
def started(*arguments: object) -> Generator[Started]:
    """A command in the background; killed if it still runs on leaving."""
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Started(process)
        finally:
            process.kill()


@contextmanager
def tiny_server(*arguments: object) -> Generator[tuple[str, Started]]:
    """A tiny server's URL and its process."""
    with started("tiny-server", "--port", 0, *arguments) as server:
        yield server.read_until("http://").strip(), server


def write_jsonl(path: Path, records: Sequence[Mapping[str, object]]) -> Path:
    """A file with these records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
