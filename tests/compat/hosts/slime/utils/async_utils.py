"""Stand-in for slime's module: one loop of the process, on its own thread."""

import asyncio
import threading


class AsyncLoopThread:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="slime")
        self._thread.start()

    def stop(self):
        """End the loop: not in slime, for the end of a test."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async_loop = None


def get_async_loop():
    global async_loop  # ruff: ignore[global-statement]  as in slime
    if async_loop is None:
        async_loop = AsyncLoopThread()
    return async_loop
