"""Waiting for time to pass: the only place of the package that sleeps."""

import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from .._core.settings import Retry
from .user_code import ends_the_process

T = TypeVar("T")


def backoff_s(attempt: int, *, base: float, longest: float, jitter: float, rng: random.Random) -> float:
    """Return the seconds before the next try: ``base``, doubled with each attempt from 1, at most ``longest``, partly random."""
    full = min(longest, base * 2.0 ** min(attempt - 1, 60))
    return full * (1.0 - jitter * rng.random())


def retry_wait_s(number: int, *, retry: Retry, rng: random.Random) -> float:
    """Return the seconds before try ``number + 1`` as the settings say; none if ``number`` is 0."""
    if not number:
        return 0.0
    return backoff_s(number, base=retry.backoff_base, longest=retry.backoff_max, jitter=retry.jitter, rng=rng)


async def wait_s(seconds: float) -> None:
    """Wait ``seconds``. Cancelled, nothing is left behind."""
    await trio.sleep(seconds)


async def try_every(seconds: float, attempt: Callable[[], Awaitable[bool]], *, until: float = math.inf) -> bool:
    """Call ``attempt`` until it returns True; the beginnings of two calls are at least ``seconds`` apart.

    Return False if it has not by ``until``, on ``trio.current_time()``'s clock. A call that is under way then is waited for.
    Cancelled, and if ``attempt`` raises, no further call is made.
    """
    while (began := trio.current_time()) < until:
        if await attempt():
            return True
        await wait_s(max(0.0, min(began + seconds, until) - trio.current_time()))
    return False


async def retried(call: Callable[[], Awaitable[T]], wait_after: Callable[[BaseException], float | None]) -> T:
    """Call until it works, and return the result. ``wait_after`` decides, and logs: the seconds before the next try; None: raise.

    ``wait_after`` does not get what ends the process (``ends_the_process``). Cancelled, no further call is made.
    """
    while True:
        try:
            return await call()
        except BaseException as error:  # noqa: ASYNC103  raised again if it is no failure, or the last one
            seconds = None if ends_the_process(error) else wait_after(error)
            if seconds is None:
                raise
        await wait_s(seconds)
