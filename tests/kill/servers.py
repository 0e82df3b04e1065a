"""Tiny servers that outlive the engines that are killed."""

import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "trio_rollout.cli")


@contextmanager
def tiny_server(delay_s: float) -> Generator[str]:
    """A tiny server's URL; it takes so long for each token, and no text ends by itself."""
    arguments = ("tiny-server", "--port", "0", "--until-stdin-closes", "--step-delay", str(delay_s), "--eos-id", "-1")
    with _running([*COMMAND, *arguments]) as url:
        yield url


@contextmanager
def observed_server(delay_s: float, notes: Path) -> Generator[str]:
    """The URL of a tiny server like that, which notes in a file each request that has ended."""
    with _running([sys.executable, "-m", "tests.kill.observed", str(notes), str(delay_s)]) as url:
        yield url


@contextmanager
def _running(command: Sequence[str]) -> Generator[str]:
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise AssertionError("a pipe was asked for")
        try:
            yield next(line for line in process.stdout if line.startswith("http")).strip()
        finally:
            process.kill()
