"""Blocking functions in threads: the port that a simulation replaces.

A real thread ends when it likes, so a virtual clock runs away from it. Whoever calls blocking functions takes a ``RunSync``
and is given ``run_in_thread`` unless told otherwise; ``run_inline`` is the one for a simulation.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class RunSync(Protocol):
    """Runs a blocking function away from the loop and returns what it returned."""

    async def __call__(self, fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Run ``fn(*args)``."""
        ...


async def run_in_thread(fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
    """Run a function that is bounded in time, such as a read of a local file, in a thread of Trio's pool.

    Blocks until a thread is free and the function has returned. Cancelled before it has started, it never runs; later
    its end is waited for and its result returned, so that nothing goes on behind the caller's back.
    """
    limiter = trio.to_thread.current_default_thread_limiter()
    return await trio.to_thread.run_sync(fn, *args, abandon_on_cancel=False, limiter=limiter)


async def run_inline(fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
    """Run the function on the loop itself: for a simulation, where nothing takes time. Cancelled, it has not run."""
    await trio.lowlevel.checkpoint()
    return fn(*args)
