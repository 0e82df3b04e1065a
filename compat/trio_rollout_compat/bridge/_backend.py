"""What a backend is: a running asyncio loop, and a way to run functions on it and on Trio's thread."""

import asyncio
import contextlib
import contextvars
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import attrs
import trio

Post = Callable[[Callable[[], object]], None]
"""Runs a function on another thread soon, in order; it must not raise."""


@attrs.frozen(eq=False)
class Running:
    """A loop that runs. ``post`` runs a function on it, ``reply`` one on Trio's thread; both from either thread.

    ``post`` raises RuntimeError when the loop is closed; ``reply`` after the end of the Trio run does nothing.
    """

    loop: asyncio.AbstractEventLoop
    post: Post
    reply: Post
    prepare: Callable[[contextvars.Context], None]
    """Makes a copy of a Trio task's context fit for asyncio tasks."""
    foreign: bool
    describe: str


class Backend(Protocol):
    """Opens a loop, or borrows one."""

    def __call__(self) -> AbstractAsyncContextManager[Running]:
        """The scope in which the loop runs, or in which it is borrowed."""
        ...


def nothing_to_prepare(_context: contextvars.Context) -> None:
    """For loops on other threads: a Trio task's context has nothing in it that asyncio would stumble over."""


def replies_to(token: trio.lowlevel.TrioToken) -> Post:
    """Runs functions on the thread of this Trio run, as long as it goes on."""

    def reply(fn: Callable[[], object]) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # nobody is left who waits for it
            token.run_sync_soon(fn)

    return reply


async def answered(running: Running, fn: Callable[[], object], seconds: float = math.inf) -> bool:
    """Run ``fn`` on the loop and wait until it has, at most so many seconds; whether it has."""
    done = trio.Event()

    def run() -> None:
        fn()
        running.reply(done.set)

    running.post(run)
    with trio.move_on_after(seconds):
        await done.wait()
    return done.is_set()


Opened = AsyncGenerator[Running]
