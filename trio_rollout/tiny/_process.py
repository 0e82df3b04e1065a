"""A tiny server in a process of its own, which dies with whoever opened it.

Owns: the child process. Its stdin is a pipe held here: should this process be killed without any chance to clean up, the
pipe closes and the child leaves by itself.
"""

import subprocess  # ruff: ignore[suspicious-subprocess-import]  only for its constant PIPE
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, final

import attrs
import trio

from .._util.service import open_service
from ..errors import ServerLost
from ._settings import TinySettings

_REAPED_WITHIN = 10.0
"""Seconds; a killed process is reaped at once unless the machine is in deep trouble."""


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
        """Of the child."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait for its end. Cancelled, it runs on."""
        return await self._process.wait()


def _arguments(settings: TinySettings) -> list[str]:
    """The command line that makes these settings; what is at its default is left out."""
    default = TinySettings()
    names = [field.name for field in attrs.fields(TinySettings) if field.name != "incremental"]
    pairs = [
        (f"--{name.replace('_', '-')}", str(getattr(settings, name)))
        for name in names
        if getattr(settings, name) != getattr(default, name)
    ]
    return [*(part for pair in pairs for part in pair), *(["--incremental"] if settings.incremental else [])]


async def _url(lines: trio.abc.ReceiveStream) -> str:
    """The first line that is a URL."""
    text = b""
    while b"\n" not in text or not text.rsplit(b"\n", 1)[0].rsplit(b"\n", 1)[-1].startswith(b"http"):
        data = await lines.receive_some(4096)
        if not data:
            raise ServerLost(
                f"the tiny server process ended before it answered; it said: {text.decode(errors='replace')!r}"
            )
        text += data
    return text.rsplit(b"\n", 1)[0].rsplit(b"\n", 1)[-1].decode()


@asynccontextmanager
async def open_tiny_process(
    settings: TinySettings | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncGenerator[TinyProcess]:
    """A tiny server in its own process, on a free port unless told otherwise.

    Entering blocks until it answers; cancelled meanwhile, the process is killed. Leaving kills and reaps it, however it is
    left. Should it die in between, the body is not disturbed: see ``returncode``.

    Raises:
      ServerLost: the process ended before it answered.

    """
    command = [sys.executable, "-m", "trio_rollout.cli", "tiny-server", "--host", host, "--port", str(port)]
    command += ["--until-stdin-closes", *_arguments(settings or TinySettings())]

    async def serve(*, task_status: trio.TaskStatus[TinyProcess]) -> None:
        # A session of its own: a terminal's Ctrl-C goes to the whole group, and a run that drains needs its server.
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
