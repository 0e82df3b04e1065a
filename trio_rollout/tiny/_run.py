"""Serve until interrupted: what the command line calls."""

import os
from collections.abc import Callable

import trio

from ..errors import ServerLost
from ._server import TinyServer, open_tiny_server
from ._settings import TinySettings

_STDIN = 0


async def _killed_at_end_of_stdin(server: TinyServer) -> None:
    async with trio.lowlevel.FdStream(os.dup(_STDIN)) as stdin:
        while await stdin.receive_some(4096):
            pass
    server.kill()


async def _serve(
    settings: TinySettings, host: str, port: int, announce: Callable[[str], None], *, until_stdin_closes: bool
) -> None:
    async with open_tiny_server(settings, host=host, port=port) as server:
        announce(server.url)
        async with trio.open_nursery() as nursery:
            if until_stdin_closes:
                nursery.start_soon(_killed_at_end_of_stdin, server)
            await server.dead.wait()
            nursery.cancel_scope.cancel()
        if server.failure is not None:
            raise ServerLost(f"the tiny server died: {server.failure}") from server.failure


def run_tiny(
    settings: TinySettings, host: str, port: int, announce: Callable[[str], None], *, until_stdin_closes: bool = False
) -> None:
    """Serve on ``host:port`` (0: a free port); ``announce`` is called with the URL once it answers.

    Returns when the process that holds the other end of stdin has gone, if ``until_stdin_closes``; else never.

    Raises:
      ServerLost: a token id outside the vocabulary came in, and the server died of it as a real one does.
      OSError: the port is taken.

    """

    async def main() -> None:
        await _serve(settings, host, port, announce, until_stdin_closes=until_stdin_closes)

    trio.run(main)
