"""The parallel gate: tools that allow it share, others are alone. First come, first served.

Invariant 1: between choosing who enters and counting it there is no checkpoint.
Invariant 2: a waiter that is cancelled leaves the queue, and whoever it kept waiting is let in at once.
"""

import collections
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import final

import attrs
import trio


@final
@attrs.define(eq=False)
class _Waiter:
    shares: bool
    admitted: trio.Event = attrs.field(factory=trio.Event)


@final
@attrs.define(eq=False, repr=False)
class ParallelGate:
    """A fair read-write lock: a queued exclusive caller holds up the sharing ones behind it."""

    _sharing: int = attrs.field(default=0, init=False)
    _exclusive: bool = attrs.field(default=False, init=False)
    _queue: collections.deque[_Waiter] = attrs.field(factory=collections.deque, init=False)

    def __repr__(self) -> str:
        inside = "1 exclusive" if self._exclusive else f"{self._sharing} sharing"
        return f"<ParallelGate {inside}, {len(self._queue)} waiting>"

    def _admit(self) -> None:
        while self._queue and not self._exclusive and (self._queue[0].shares or not self._sharing):
            waiter = self._queue.popleft()
            self._count(waiter)
            waiter.admitted.set()

    def _count(self, waiter: _Waiter) -> None:
        if waiter.shares:
            self._sharing += 1
        else:
            self._exclusive = True

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.shares:
            self._sharing -= 1
        else:
            self._exclusive = False
        self._admit()

    async def _enter(self, waiter: _Waiter) -> None:
        self._queue.append(waiter)
        self._admit()
        try:
            await waiter.admitted.wait()
        except trio.Cancelled:
            if waiter.admitted.is_set():  # let in and cancelled in the same tick
                self._leave(waiter)
            else:
                self._queue.remove(waiter)
                self._admit()
            raise

    @asynccontextmanager
    async def hold(self, *, shares: bool) -> AsyncGenerator[None]:
        """Be inside for the length of a block. Entering waits; cancelled, the place in the queue is given up."""
        await trio.lowlevel.checkpoint_if_cancelled()
        waiter = _Waiter(shares)
        await self._enter(waiter)
        try:
            yield
        finally:
            self._leave(waiter)
