"""The tiny server that notes what it was asked for: ``python -m tests.kill.observed NOTES STEP_DELAY``.

A prompt's last line names its life, group, sample, try and turn. When the request has ended, that line and the kind of its
end are appended to NOTES, which several servers may share. No text ends by itself. The server ends with its stdin.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import attrs
import trio

from trio_rollout.tiny import TinySettings, TinyTokenizer, open_tiny_server
from trio_rollout.tiny._frontend import Registry
from trio_rollout.tiny._scheduler.request import Request


@attrs.define(eq=False, repr=False, kw_only=True)
class Noting(Registry):  # type: ignore[misc]  final for users
    """The register of requests, which hears of each one's end."""

    notes: int
    tokenizer: TinyTokenizer = attrs.field(factory=TinyTokenizer.load)

    def settle(self, requests: Iterable[Request], now: float) -> None:
        """Note them, then go on as usual."""
        requests = tuple(requests)
        for request in requests:
            line = self.tokenizer.decode(request.prompt.tolist(), skip_special=True, final=True).rpartition("\n")[2]
            end = "aborted" if request.finish is None or request.finish["type"] == "abort" else "sampled"
            os.write(self.notes, f"{line} {end}\n".encode())
        super().settle(requests, now)


async def main(notes: str, step_delay: str) -> None:
    """Serve until stdin ends."""
    settings = TinySettings(step_delay=float(step_delay), eos_id=-1)
    written = os.open(notes, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    async with open_tiny_server(settings, host="127.0.0.1", port=0) as server:
        server.frontend.registry = Noting(notes=written)
        os.write(1, f"{server.url}\n".encode())
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            while await stdin.receive_some(4096):
                pass


if __name__ == "__main__":
    trio.run(main, str(Path(sys.argv[1])), sys.argv[2])
