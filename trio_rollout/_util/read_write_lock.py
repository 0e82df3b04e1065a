"""A fair lock for many readers or one writer: first come, first served.

A queued writer holds up the readers behind it, so it is never starved. Two places use it: the tiny server, where requests
read and weight updates write, and tool dispatch, where parallel tools read and all others write.

Invariant 1: between choosing who enters and counting it there is no checkpoint.
Invariant 2: a cancelled waiter leaves the queue, and those that only it held up enter at once.
"""

import collections
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import final

import attrs
import trio


@final
@attrs.define(eq=False)
class _Waiter:
    writes: bool
    admitted: trio.Event = attrs.field(factory=trio.Event)


@final
@attrs.define(eq=False, repr=False)
class ReadWriteLock:
    """The readers or the writer inside, and the queue of those that wait."""

    _readers: int = attrs.field(default=0, init=False)
    _writing: bool = attrs.field(default=False, init=False)
    _queue: collections.deque[_Waiter] = attrs.field(factory=collections.deque, init=False)

    def __repr__(self) -> str:
        inside = "a writer" if self._writing else f"{self._readers} readers"
        return f"<ReadWriteLock {inside}, {len(self._queue)} waiting>"

    @property
    def held(self) -> bool:
        """True while a reader or a writer is inside."""
        return self._writing or self._readers > 0

    def reading(self) -> AbstractAsyncContextManager[None]:
        """Be inside as a reader for the length of a block. Entering blocks while a writer is inside or ahead in the queue.

        Cancelled while it waits, the caller loses its place in the queue.
        """
        return self._inside(_Waiter(writes=False))

    def writing(self) -> AbstractAsyncContextManager[None]:
        """Be inside alone for the length of a block. Entering blocks until everyone ahead has left; cancelled, as ``reading``."""
        return self._inside(_Waiter(writes=True))

    @asynccontextmanager
    async def _inside(self, waiter: _Waiter) -> AsyncGenerator[None]:
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._enter(waiter)
        try:
            yield
        finally:
            self._leave(waiter)

    async def _enter(self, waiter: _Waiter) -> None:
        self._queue.append(waiter)
        self._admit()
        try:
            await waiter.admitted.wait()
        except trio.Cancelled:
            if waiter.admitted.is_set():  # admitted and cancelled in the same tick
                self._leave(waiter)
            else:
                self._queue.remove(waiter)
                self._admit()
            raise

    def _admit(self) -> None:
        while self._queue and not self._writing and not (self._queue[0].writes and self._readers):
            waiter = self._queue.popleft()
            if waiter.writes:
                self._writing = True
            else:
                self._readers += 1
            waiter.admitted.set()

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.writes:
            self._writing = False
        else:
            self._readers -= 1
        self._admit()
