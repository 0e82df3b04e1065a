"""Blocking calls without threads, which would make a virtual clock run away: made in place, after a virtual delay."""

import random
from collections.abc import Callable
from typing import TypeVar, final

import attrs
import trio

T = TypeVar("T")


@final
@attrs.frozen(kw_only=True)
class SimIO:
    """For ``open_ledger(..., io=SimIO())``. Each call takes up to ``longest_s`` seconds, drawn from ``rng``.

    Like a real call it can be cancelled while it waits for its token, and not once it is made.
    """

    longest_s: float = 0.005
    rng: random.Random = attrs.field(factory=lambda: random.Random(0))

    async def __call__(self, call: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
        async with limiter:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.longest_s * self.rng.random())
            return call()
