"""The attach backend: user code runs on a loop that the host owns and runs on another thread.

It is the one to choose when the host has a loop: its global clients and semaphores belong to that loop. It is never
stopped by us.
"""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import attrs
import trio

from ._backend import Opened, Running, answered, nothing_to_prepare, replies_to
from ._errors import BridgeError


@attrs.frozen
class Attach:
    """Borrow ``loop``, which must be running on another thread. It has ``answer`` seconds to say so."""

    loop: asyncio.AbstractEventLoop
    answer: float

    @asynccontextmanager
    async def __call__(self) -> Opened:
        """Borrow it.

        Raises:
          BridgeError: it is closed, or does not run functions.

        """
        loop = self.loop

        def post(fn: Callable[[], object]) -> None:
            loop.call_soon_threadsafe(fn)

        running = Running(
            loop=loop,
            post=post,
            reply=replies_to(trio.lowlevel.current_trio_token()),
            prepare=nothing_to_prepare,
            foreign=True,
            describe=f"the host's {loop!r}",
        )
        if loop.is_closed():
            raise BridgeError(f"attach to {loop!r}: it is closed")
        if not await answered(running, lambda: None, self.answer):
            raise BridgeError(
                f"attach to {loop!r}: it did not run a function within {self.answer} s. It is not running, it is blocked, or "
                "it is the loop of this very thread, which cannot run while Trio does (run the engine in an EngineThread)"
            )
        yield running
