"""The thread backend: a loop of our own on a thread of our own; a user function that blocks does not stall the engine.

The attach backend: user code runs on a loop that the host owns and runs on another thread.

It is the one to choose when the host has a loop: its global clients and semaphores belong to that loop. It is never
stopped by us.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any, Final, final

import attrs
import trio

from ._backend import Opened, Running, answered, nothing_to_prepare, replies_to
from ._errors import BridgeError

_log: Final = logging.getLogger("trio_rollout.compat")


@final
@attrs.define(eq=False)
class _Loop:
    """A loop and the thread that runs it. ``finished`` is called on that thread when the loop is closed."""

    loop: asyncio.AbstractEventLoop
    finished: Callable[[], None]
    _stopping: bool = attrs.field(default=False, init=False)

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._stopping:
                self._run_until_stopped()
            self.loop.run_until_complete(self._wind_up())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
            self.finished()

    def _run_until_stopped(self) -> None:
        try:
            self.loop.run_forever()  # returns when somebody's code stops the loop: it is not theirs to stop
        except (SystemExit, KeyboardInterrupt) as error:
            _log.error("a callback on the bridge's loop raised %r; the loop goes on", error)

    def stop(self) -> None:
        self._stopping = True
        self.loop.stop()

    async def _wind_up(self) -> None:
        """What ``asyncio.run`` does at its end, for what the bridge does not know."""
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.sleep(0)
        await self.loop.shutdown_asyncgens()


@attrs.frozen
class Thread:
    """Run a loop made by ``factory``, such as ``uvloop.new_event_loop``. Leaving waits ``grace`` seconds for the thread."""

    factory: Callable[[], asyncio.AbstractEventLoop] | None
    grace: float

    @asynccontextmanager
    async def __call__(self) -> Opened:
        """Start it. Leaving blocks until the loop is closed, at most ``grace`` seconds: its code may block."""
        reply = replies_to(trio.lowlevel.current_trio_token())
        over = trio.Event()
        # Not asyncio.new_event_loop: where trio_asyncio was imported it refuses inside of Trio.
        served = _Loop((self.factory or asyncio.SelectorEventLoop)(), lambda: reply(over.set))
        thread = threading.Thread(target=served.run, name="trio-rollout asyncio", daemon=True)

        def post(fn: Callable[[], Any]) -> None:
            served.loop.call_soon_threadsafe(fn)

        thread.start()
        try:
            yield Running(
                loop=served.loop,
                post=post,
                reply=reply,
                prepare=nothing_to_prepare,
                foreign=False,
                describe=f"{served.loop!r} on a thread of the bridge",
            )
        finally:
            with contextlib.suppress(RuntimeError):  # closed already: its thread died
                post(served.stop)
            with trio.move_on_after(self.grace, shield=True):
                await over.wait()
            if not over.is_set():
                _log.error("the bridge's loop did not stop within %s s: its thread is left to itself", self.grace)
            else:
                thread.join()


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
