"""Aborts on their way to one server, over connections of their own.

Reserved: an abort never waits behind a generation (in two real systems it queued for 18 s). Bounded: cancelling thousands of
requests at once must not need thousands of further connections; SGLang answers an abort at once, so a few carry them all.
"""

from typing import Final, final

import attrs
import trio

from ._http import ConnectionBroken, Pool, post_request
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
