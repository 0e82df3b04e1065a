"""Handshakes between Trio and asyncio, on any thread."""

import asyncio
from collections.abc import Callable

import trio


class Reached:
    """``reached()`` from any thread lets ``await reached.wait()`` in Trio go on. Made in Trio."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._event = trio.Event()

    def __call__(self) -> None:
        self._token.run_sync_soon(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()


def forever() -> "asyncio.Future[None]":
    """Return a future of the running loop that is never resolved."""
    return asyncio.get_running_loop().create_future()


Mark = Callable[[], None]
