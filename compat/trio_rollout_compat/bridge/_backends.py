"""A loop on another thread than Trio's: one of the bridge's own, or one that the host owns and runs.

A backend opens a loop, or borrows one, and yields a ``RunningLoop``: the only way in which the two threads talk. The third
backend, in Trio's own thread, is in ``_inloop``.
"""

import asyncio
import contextlib
import contextvars
import logging
import math
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol, final

import attrs
import trio

from ._errors import BridgeError

_log: Final = logging.getLogger("trio_rollout.compat")

Post = Callable[[Callable[[], object]], None]
"""Runs a function on another thread soon, in the order of the calls. The function must not raise."""


@attrs.frozen(eq=False)
class RunningLoop:
    """On any thread: an asyncio loop that runs.

    ``post`` runs a function on the loop's thread and raises RuntimeError when the loop is closed; ``reply`` runs one on
    Trio's thread and does nothing after the end of the Trio run. Both may be called on either thread.
    """

    loop: asyncio.AbstractEventLoop
    post: Post
    reply: Post
    prepare: Callable[[contextvars.Context], None]
    """Makes a copy of a Trio task's context fit for asyncio tasks. On Trio's thread."""
    foreign: bool
    """The loop is the host's."""
    describe: str


class Backend(Protocol):
    """On Trio's thread: opens a loop, or borrows one."""

    def __call__(self) -> AbstractAsyncContextManager[RunningLoop]:
        """Return the scope in which the loop runs, or in which it is borrowed."""
        ...


@attrs.frozen
class ThreadBackend:
    """On Trio's thread: runs the bridge's own loop on a separate thread, so that user code may block it.

    ``factory`` makes the loop, such as ``uvloop.new_event_loop``. Leaving waits ``grace`` seconds for the thread.
    """

    factory: Callable[[], asyncio.AbstractEventLoop] | None
    grace: float

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[RunningLoop]:
        """Start the loop. Leaving blocks until it is closed, at most ``grace`` seconds: user code may block the loop."""
        reply = replies_to(trio.lowlevel.current_trio_token())
        over = trio.Event()
        # Not asyncio.new_event_loop: where trio_asyncio was imported it refuses inside of Trio.
        served = _LoopThread((self.factory or asyncio.SelectorEventLoop)(), lambda: reply(over.set))
        thread = threading.Thread(target=served.run, name="trio-rollout asyncio", daemon=True)
        post = posts_to(served.loop)
        thread.start()
        try:
            yield RunningLoop(
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
                _log.error("the bridge's loop did not stop within %s s: its thread goes on", self.grace)
            else:
                thread.join()


@final
@attrs.define(eq=False)
class _LoopThread:
    """On the loop's thread: the function of that thread. ``finished`` is called there when the loop is closed."""

    loop: asyncio.AbstractEventLoop
    finished: Callable[[], None]
    _stopping: bool = attrs.field(default=False, init=False)

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._stopping:
                self._run_until_stopped()
            self.loop.run_until_complete(self._cancel_what_is_left())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
            self.finished()

    def _run_until_stopped(self) -> None:
        try:
            self.loop.run_forever()  # returns when user code stops the loop, which it must not: the bridge owns it
        except (SystemExit, KeyboardInterrupt) as error:
            _log.error("a callback on the bridge's loop raised %r; the loop goes on", error)

    def stop(self) -> None:
        self._stopping = True
        self.loop.stop()

    async def _cancel_what_is_left(self) -> None:
        """Do what ``asyncio.run`` does at its end, for tasks that belong to no call."""
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.sleep(0)
        await self.loop.shutdown_asyncgens()


@attrs.frozen
class AttachBackend:
    """On Trio's thread: borrows ``loop``, which the host runs on another thread; it has ``answer`` seconds to respond.

    The one to choose when the host has a loop: global clients and semaphores of user code belong to that loop. The bridge
    never stops it.
    """

    loop: asyncio.AbstractEventLoop
    answer: float

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[RunningLoop]:
        """Borrow the loop. Blocks until it has run a function.

        Raises:
          BridgeError: the loop is closed, or does not run functions.
        """
        loop = self.loop
        running = RunningLoop(
            loop=loop,
            post=posts_to(loop),
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


def nothing_to_prepare(_context: contextvars.Context) -> None:
    """Leave the context as it is: asyncio stumbles over nothing in it, unless the loop is trio-asyncio's."""


def posts_to(loop: asyncio.AbstractEventLoop) -> Post:
    """Return a function that runs functions on the loop's thread."""

    def post(fn: Callable[[], object]) -> None:
        loop.call_soon_threadsafe(fn)

    return post


def replies_to(token: trio.lowlevel.TrioToken) -> Post:
    """Return a function that runs functions on the thread of this Trio run, as long as the run goes on."""

    def reply(fn: Callable[[], object]) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # no task is left that waits for it
            token.run_sync_soon(fn)

    return reply


async def answered(running: RunningLoop, fn: Callable[[], object], seconds: float = math.inf) -> bool:
    """On Trio's thread: run ``fn`` on the loop's, and wait for that, at most so many seconds; return True if it has run."""
    done = trio.Event()

    def run() -> None:
        fn()
        running.reply(done.set)

    running.post(run)
    with trio.move_on_after(seconds):
        await done.wait()
    return done.is_set()
