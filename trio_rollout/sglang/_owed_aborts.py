"""Aborts on their way to one server, over connections of their own.

Reserved: an abort never waits behind a generation (in two real systems it queued for 18 s). Bounded: cancelling thousands of
requests at once must not need thousands of further connections; SGLang answers an abort at once, so a few carry them all.

The requests that are being left on one server, and who aborts them: two tasks for all of them.

With tasks of their own for each, 8,000 requests that were cancelled at once kept the loop busy until the time for their aborts
was over, and not one had been sent.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar, final

import attrs
import trio

from .._http import ConnectionBroken, Pool, post_request
from .._util.time import wait_s
from ._wire import abort_body

RESERVED: Final = 8
# A server that hasn't answered an abort by then won't; the connection is better used for the next one.
_ONE_ABORT_S: Final = 1.0


@final
@attrs.define(eq=False, repr=False)
class AbortLane:
    """Sends aborts to one server."""

    pool: Pool
    _head: bytes
    _turns: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(RESERVED), init=False)

    async def send(self, rid: str) -> bool:
        """Ask the server to abort a request; whether it answered. That is no promise that it aborted anything.

        Blocks for a reserved connection and about a second at most. Cancelled, the abort may or may not have been sent.

        Raises:
          NotConnected: the server can't be reached.
          ConnectionBroken, BadResponse: it gave no answer.

        """
        async with self._turns:
            with trio.move_on_after(_ONE_ABORT_S):
                data = post_request(self._head, abort_body(rid))
                return await self._once(data, fresh=False) or await self._once(data, fresh=True)
        return False

    async def _once(self, data: bytes, *, fresh: bool) -> bool:
        with await self.pool.take(fresh=fresh) as exchange:
            try:
                await exchange.send(data)
                await exchange.receive()
            except ConnectionBroken as error:
                if exchange.reused and not error.answered:
                    return False
                raise
        return True


T = TypeVar("T")

REPEAT_S: Final = 0.5
"""A server may lose an abort, so it is repeated, but not more often than this."""


@attrs.define(eq=False)
class Leaving:
    """One request that was cancelled and whose answer is awaited in ``scope``."""

    rid: str
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@final
class Ends(Generic[T]):
    """Both ends of a channel without a bound: what is in it is bounded by the requests that are being left."""

    def __init__(self) -> None:
        self.send, self.receive = trio.open_memory_channel[T](math.inf)


@final
@attrs.define(eq=False, repr=False)
class LeavingRequests:
    """Aborts each of them until it is over."""

    _all: dict[Leaving, None] = attrs.field(factory=dict, init=False)
    _due: Ends[Leaving] = attrs.field(factory=Ends[Leaving], init=False)
    _again: Ends[tuple[float, Leaving]] = attrs.field(factory=Ends[tuple[float, Leaving]], init=False)

    def begin(self, rid: str) -> Leaving:
        """Have this request aborted from now on. The caller enters its scope, and says when it is over."""
        leaving = Leaving(rid)
        self._all[leaving] = None
        self._due.send.send_nowait(leaving)
        return leaving

    def end(self, leaving: Leaving) -> None:
        """It is over: no more aborts."""
        del self._all[leaving]

    def give_up(self) -> None:
        """The server is paused and acknowledges nothing: nobody waits any longer."""
        for leaving in self._all:
            leaving.scope.cancel(reason="the server is paused")

    async def serve(self, abort: Callable[[str], Awaitable[bool]]) -> None:
        """Send the aborts, a bounded number at once. Runs until cancelled."""
        turns = trio.Semaphore(RESERVED)

        async def send(leaving: Leaving) -> None:
            began = trio.current_time()
            await abort(leaving.rid)
            turns.release()
            self._again.send.send_nowait((began + REPEAT_S, leaving))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat)
            async for leaving in self._due.receive:
                if leaving in self._all:
                    await turns.acquire()
                    nursery.start_soon(send, leaving)

    async def _repeat(self) -> None:
        async for at, leaving in self._again.receive:
            if leaving in self._all:
                await wait_s(max(0.0, at - trio.current_time()))
            if leaving in self._all:
                self._due.send.send_nowait(leaving)
