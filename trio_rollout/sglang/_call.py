"""One try of one request on one server: its identity, and how its answer is read."""

from http import HTTPStatus
from typing import final

import attrs

from .._core.values import Turn
from ..errors import ServerLost
from ._http import EVENT_STREAM, Response
from ._naming import Named
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
        return self.server.naming.version_of(name, self.named)

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
