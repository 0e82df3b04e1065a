"""A tiny server that outlives what is killed, and appends a line to NOTES for each request that has ended.

``python -m tests.gateway.counting_server NOTES STEP_DELAY [SCRIPT]``; it ends with its stdin.
"""

import os
import sys
from pathlib import Path

import trio

from tests.kill.observed import Noting
from trio_rollout.tiny import TinySettings, open_tiny_server


async def main(notes, step_delay, script=None):
    """Serve until stdin ends."""
    settings = TinySettings(step_delay=float(step_delay), script=None if script is None else Path(script))
    written = os.open(notes, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    async with open_tiny_server(settings, host="127.0.0.1", port=0) as server:
        server.frontend.registry = Noting(notes=written)
        os.write(1, f"{server.url}\n".encode())
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            while await stdin.receive_some(4096):
                pass


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
