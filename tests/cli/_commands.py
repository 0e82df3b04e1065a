"""Run the command line in separate processes, as a user does."""

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
"""Seconds after which a command is taken to hang."""


@attrs.frozen
class Ended:
    """The output and the exit status of a command."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of the output, with single spaces."""
        return [" ".join(line.split()) for line in self.out.splitlines()]


def command(*arguments: object, cwd: Path | None = None) -> Ended:
    """Run a command until it exits."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@attrs.define
class Started:
    """A running command, whose output is read line by line."""

    process: "subprocess.Popen[str]"
    seen: list[str] = attrs.field(factory=list)

    def read_until(self, pattern: str) -> str:
        """Return the next line that matches the pattern."""
        for line in self.process.stdout or ():
            self.seen.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"the command ended before {pattern!r}: {self.seen}, {self.process.stderr.read()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command."""
        self.process.send_signal(number)

    def ctrl_c(self) -> None:
        """Send SIGINT as a terminal does: to the command and every process of its group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> Ended:
        """Wait until the command exits."""
        out, err = self.process.communicate(timeout=LONGEST_S)
        return Ended(self.process.returncode, "".join(self.seen) + out, err)


@contextmanager
def started(*arguments: object) -> Generator[Started]:
    """Run a command in the background; kill it on leaving if it still runs."""
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
    """Run a tiny server; yield its URL and its process."""
    with started("tiny-server", "--port", 0, *arguments) as server:
        yield server.read_until("http://").strip(), server


def write_jsonl(path: Path, items: Sequence[Mapping[str, object]]) -> Path:
    """Write a file with one item a line."""
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path
