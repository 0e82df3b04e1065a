"""Tiny servers that outlive those who are killed."""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

COMMAND = (sys.executable, "-m", "trio_rollout.cli")


@contextmanager
def tiny_server(delay_s: float) -> Generator[str]:
    """A tiny server's URL; it takes so long for each token, and no text ends by itself."""
    arguments = ("tiny-server", "--port", "0", "--until-stdin-closes", "--step-delay", str(delay_s), "--eos-id", "-1")
    with subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise AssertionError("a pipe was asked for")
        try:
            yield next(line for line in process.stdout if line.startswith("http")).strip()
        finally:
            process.kill()
