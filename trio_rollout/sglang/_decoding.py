"""Where an answer is decoded: small ones on the loop, large ones in a thread, so that everybody else goes on meanwhile."""

from typing import Final, final

import attrs
import trio

from .._core.values import Turn
from .._threads import RunSync, run_in_thread
from ._call import Call
from ._http import Response

# Decoding holds the interpreter for milliseconds at a time in a thread too. Measured with a 1 ms ticker, p99 excess on the
# loop and in a thread: 8,192 tokens (380 kB) 7 and 6 ms, 16,384 17 and 11 ms, 32,768 49 and 12 ms. A thread costs 0.2 ms.
THREAD_BYTES: Final = 512 * 1024


@final
@attrs.define(eq=False, repr=False)
class Decoding:
    """Decodes answers, a large one at a time: threads that want the same interpreter only get into each other's way."""

    _run_sync: RunSync = run_in_thread
    _one: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)

    def turn_now(self, call: Call, response: Response) -> Turn | None:
        """The answer as a Turn; None if it is so large that ``turn`` must be awaited. Raises as ``Call.turn_of`` does."""
        return call.turn_of(response) if len(call.undecoded(response)) < THREAD_BYTES else None

    async def turn(self, call: Call, response: Response) -> Turn:
        """A large answer as a Turn.

        Blocks until the ones before it are decoded, and it is. Cancelled before it is begun, it is never decoded; later its
        end is waited for and the Turn returned, as for every answer that was there before its cancellation.

        Raises what ``Call.turn_of`` does.

        """
        async with self._one:
            return await self._run_sync(call.turn_of, response)
