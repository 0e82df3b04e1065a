"""A tiny server in a child process, which ends with the process that opened it.

Owns: the child process. The child's stdin is a pipe from this process: if this process is killed without a chance to clean
up, the pipe closes and the child exits.
"""

import re
import subprocess  # ruff: ignore[suspicious-subprocess-import]  only for its constant PIPE
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, final

import attrs
import trio

from .._util.arguments import require_trio
from .._util.service import open_service
from ..errors import ServerLost
from ._settings import TinySettings

_REAPED_WITHIN = 10.0
"""Seconds. A killed process is reaped at once, unless the machine is badly overloaded."""


@final
@attrs.define(eq=False, repr=False)
class TinyProcess:
    """A running server process."""

    url: str
    _process: trio.Process

    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"exited {self.returncode}"
        return f"<TinyProcess {self.url} pid {self.pid}, {state}>"

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._process.returncode

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait until the process ends, and return its exit status. Cancelled, the process runs on."""
        return await self._process.wait()


def _arguments(settings: TinySettings) -> list[str]:
    """Return the command-line options of these settings; defaults are left out."""
    found = ["--incremental"] if settings.incremental else []
    for field in attrs.fields(TinySettings):
        value = getattr(settings, field.name)
        if field.name != "incremental" and value != getattr(TinySettings(), field.name):
            found += [f"--{field.name.replace('_', '-')}", str(value)]
    return found


async def _url(lines: trio.abc.ReceiveStream) -> str:
    """Return the first line that is a URL."""
    text = b""
    while not (found := re.search(rb"^(http.*)\n", text, re.MULTILINE)):
        data = await lines.receive_some(4096)
        if not data:
            said = text.decode(errors="replace")
            raise ServerLost(f"the tiny server process ended before it answered; its output: {said!r}")
        text += data
    return found[1].decode()


@asynccontextmanager
async def open_tiny_process(
    settings: TinySettings | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncGenerator[TinyProcess]:
    """Run a tiny server in a child process, on a free port by default.

    Entering blocks until the server answers; cancelled meanwhile, the process is killed. Leaving kills and reaps the process.
    If it ends before that, the body is not disturbed: see ``returncode``.

    Raises:
      ServerLost: the process ended before it answered.
    """
    require_trio("open_tiny_process")
    command = [sys.executable, "-m", "trio_rollout.cli", "tiny-server", "--host", host, "--port", str(port)]
    command += ["--until-stdin-closes", *_arguments(settings or TinySettings())]

    async def serve(*, task_status: trio.TaskStatus[TinyProcess]) -> None:
        # In a new session: a terminal's Ctrl-C goes to the whole process group, and a run that drains needs its server.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = await trio.lowlevel.open_process(command, start_new_session=True, **pipes)
        if process.stdout is None or process.stdin is None:
            raise AssertionError("pipes were asked for")
        async with process.stdin, process.stdout:
            try:
                task_status.started(TinyProcess(await _url(process.stdout), process))
                while await process.stdout.receive_some(4096):
                    pass
                await process.wait()
            finally:
                process.kill()
                with trio.move_on_after(_REAPED_WITHIN, shield=True):
                    await process.wait()

    async def leave(server: TinyProcess, _error: BaseException | None) -> None:
        server.kill()
        with trio.move_on_after(_REAPED_WITHIN):
            await server.wait()

    async with open_service(serve, leave) as server:
        yield server
