"""The way from tasks to blocking disk calls: bounded, and never abandoned once it has begun."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class RunIO(Protocol):
    """Runs a blocking call. A simulation runs it in place, for threads would make its clock run away."""

    async def __call__(self, call: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
        """Run it under one of the limiter's tokens."""
        ...


async def run_io(call: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
    """Run a blocking call in a thread, under one of the limiter's tokens.

    Blocks until there is a token, then until the call has ended. Cancelled while it waits for the token, the call is not
    made. Once it is made, nothing interrupts it: token and arguments are held until it has ended, however often the
    caller is cancelled; then its own result or error is what comes back, and the cancellation waits for the next
    checkpoint.
    """
    # This is what trio promises of an unabandonable thread; tests/ledger/test_io.py holds it to that.
    return await trio.to_thread.run_sync(call, abandon_on_cancel=False, limiter=limiter)
