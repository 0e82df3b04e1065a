"""One try of one request on one server: its identity, and how its answer is read.

Where an answer is decoded: small ones on the loop, large ones in a thread, so that everybody else goes on meanwhile.
"""

from http import HTTPStatus
from typing import Final, final

import attrs
import trio

from .._core.server import Named
from .._core.values import Turn
from .._http import EVENT_STREAM, Response
from .._util.threads import RunSync, run_in_thread
from ..errors import ServerLost
from ._server import Server
from ._wire import GENERATE, GenerateRequest, StreamDecoder, decode_turn, error_of, nothing_moved, words_of


def _is_stream(response: Response) -> bool:
    return (response.header(b"content-type") or "").startswith(EVENT_STREAM)


@final
@attrs.define(eq=False)  # frozen costs a call for each field
class Call:
    """One try: where it goes, under which rid, what the server's weights were called when it was sent, and its stream."""

    server: Server
    rid: str
    request: GenerateRequest
    named: Named
    stream: StreamDecoder | None

    @property
    def attempted(self) -> str:
        """Who was asked for what: the beginning of every error message about it."""
        return f"POST {self.server.url}{GENERATE} {self.rid}"

    def version_of(self, name: object) -> int:
        """What a version's name in its answer stands for."""
        return self.server.weights.version_of(name, self.named)

    def undecoded(self, response: Response) -> bytes | memoryview:
        """What ``turn_of`` has to decode, wherever it runs: the body, or the newest of the whole answers that a stream repeats."""
        if self.stream is None or not _is_stream(response):
            return response.body
        # A stream of announced length is decoded as it is fed, and tells of progress: on the loop.
        return b"" if response.body else self.stream.newest

    def turn_of(self, response: Response) -> Turn:
        """The answer as a Turn.

        Raises:
          RequestRejected, ServerBusy, ServerError: it is none; in the server's words.
          ServerLost: a stream that ended before the answer did.

        """
        if response.status != HTTPStatus.OK:
            retry_after = response.header(b"retry-after")
            raise error_of(self.attempted, response.status, words_of(response.body), retry_after=retry_after)
        if self.stream is None or not _is_stream(response):
            return decode_turn(response.body, self)
        self.stream.feed(bytes(response.body))  # what did not go through it while it came
        turn = self.stream.turn(self)
        if turn is None:
            raise self.lost("the stream ended without its last event")
        return turn

    def lost(self, why: str) -> ServerLost:
        """The exception for an answer that never became complete, with what a stream had brought."""
        tokens = self.stream.cut_off(self) if self.stream is not None else None
        return ServerLost(f"{self.attempted}: {why}", tokens=tokens)

    def unwatch(self) -> None:
        """Report no more progress: nobody waits for this answer."""
        if self.stream is not None:
            self.stream.moved = nothing_moved
            self.stream.on_tokens = None


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
