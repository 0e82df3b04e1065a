"""One generate call: tries on servers, one after the other, until there is a Turn or a reason why there is none."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Final, final

import attrs
import trio

from .._core.enums import CacheSalt, Stop
from .._core.sampling import SamplingParams
from .._core.server import Event, Told
from .._core.values import Turn
from .._core.weights import Named
from .._http import EVENT_STREAM, BadResponse, ConnectionBroken, Exchange, NotConnected, Response, post_request
from .._util.time import backoff_s, wait_s
from ..abc import ModelInput, OnTokens
from ..errors import ServerBusy, ServerError, ServerLost
from ._cancellation import abort_once, leave
from ._fleet import Fleet
from ._server import Server
from ._wire import (
    GENERATE,
    GenerateRequest,
    StreamDecoder,
    decode_turn,
    error_of,
    ignore_progress,
    says_abort,
    words_of,
)

# Decoding holds the interpreter for milliseconds at a time in a thread too. Measured with a 1 ms ticker, p99 excess on the
# loop and in a thread: 8,192 tokens (380 kB) 7 and 6 ms, 16,384 17 and 11 ms, 32,768 49 and 12 ms. A thread costs 0.2 ms.
# See docs/decisions/0024-large-answers-are-decoded-in-a-thread.md.
_THREAD_BYTES: Final = 512 * 1024


def _is_stream(response: Response) -> bool:
    return (response.header(b"content-type") or "").startswith(EVENT_STREAM)


@final
@attrs.define(eq=False)  # frozen costs a call for each field
class Call:
    """One try of a request on one server. ``named``: the name of the server's weights when it was sent."""

    server: Server
    rid: str
    request: GenerateRequest
    named: Named
    stream: StreamDecoder | None

    @property
    def attempted(self) -> str:
        """The beginning of every error message about it: the method, the URL and the request id."""
        return f"POST {self.server.url}{GENERATE} {self.rid}"

    def version_of(self, name: object) -> int:
        """Return the version that a name in its answer stands for."""
        return self.server.standing.weights.version_of(name, self.named)

    def undecoded(self, response: Response) -> bytes | memoryview:
        """Return the bytes that ``turn_of`` has to decode: the body, or the newest event of a stream whose events repeat the answer."""
        if self.stream is None or not _is_stream(response):
            return response.body
        # A stream of announced length is decoded as it is fed, on the loop, because it reports progress.
        return b"" if response.body else self.stream.newest

    def turn_of(self, response: Response) -> Turn:
        """Return the answer as a Turn.

        Raises:
          RequestRejected, ServerBusy, ServerError: the answer is an error; in the server's words.
          ServerLost: the stream ended before the answer did.
        """
        if response.status != HTTPStatus.OK:
            retry_after = response.header(b"retry-after")
            raise error_of(self.attempted, response.status, words_of(response.body), retry_after=retry_after)
        if self.stream is None or not _is_stream(response):
            return decode_turn(response.body, self)
        try:
            self.stream.feed(bytes(response.body))  # the part that was not fed to it while it came
        except BadResponse as error:
            raise ServerError(f"{self.attempted}: {error}") from error
        turn = self.stream.turn(self)
        if turn is None:
            raise self.lost("the stream ended without its last event")
        return turn

    def lost(self, why: str) -> ServerLost:
        """Return the exception for an answer that never became complete, with the tokens that a stream had brought."""
        tokens = self.stream.cut_off(self) if self.stream is not None else None
        return ServerLost(f"{self.attempted}: {why}", tokens=tokens)

    def unwatch(self) -> None:
        """Report no more progress: the call that waited for this answer was cancelled."""
        if self.stream is not None:
            self.stream.on_progress = ignore_progress
            self.stream.on_tokens = None

    def turn_now(self, response: Response) -> Turn | None:
        """Return the answer as a Turn; None if it is so large that it has to be decoded in a thread. Raises as ``turn_of`` does."""
        return self.turn_of(response) if len(self.undecoded(response)) < _THREAD_BYTES else None


@final
@attrs.define(eq=False, repr=False)
class Generation:
    """The tries of one request. ``abort_s``: how long leaving it may take once it was sent."""

    fleet: Fleet
    input_ids: ModelInput
    sampling: SamplingParams
    extra: Mapping[str, object]
    affinity: str | None
    abort_s: float
    on_progress: Callable[[], None] | None = None
    on_tokens: OnTokens | None = None
    while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    request: GenerateRequest = attrs.field(init=False)
    _refusals: int = attrs.field(default=0, init=False)

    async def run(self) -> Turn:
        """Try until there is an answer; see ``InferenceServers.generate``."""
        fleet = self.fleet
        streams = self.on_progress is not None or self.on_tokens is not None
        self.request = fleet.requests.encode(self.input_ids, self.sampling, self.extra, stream=streams)
        while True:
            server = fleet.choose_now(self.affinity)
            if server is None:
                with self.while_waiting():
                    server = await fleet.choose(self.affinity)
            server.in_flight += 1
            try:
                turn = await self._on(server)
                if turn is not None:
                    return turn
            except ServerBusy as busy:
                self._note_busy(server, busy)
            finally:
                server.in_flight -= 1
            await self._wait_while_busy()

    async def _on(self, server: Server) -> Turn | None:
        """Try once on this server; None: nothing was sent, or the server had closed the connection before it could answer."""
        exchange = server.work.take_idle()
        while True:
            if exchange is None:
                exchange = await self._connect(server)
                if exchange is None:
                    return None
            with exchange:
                if not server.usable:  # paused or lost while the connection was opened
                    return None
                call = Call(
                    server, self.fleet.ports.new_rid(), self.request, server.standing.weights.now, self._stream()
                )
                response = await self._exchange(call, exchange)
            if response is not None:
                return self._told(call, call.turn_now(response) or await self._turn_in_a_thread(call, response))
            exchange = None  # that one was stale, which a new connection never is

    async def _turn_in_a_thread(self, call: Call, response: Response) -> Turn:
        """Return a large answer as a Turn.

        Blocks until the large answers before it are decoded, and it is. Cancelled before it is begun, it is never decoded;
        later its end is waited for and the Turn returned, as for every answer that was there before its cancellation.
        """
        async with self.fleet.decoding:
            return await self.fleet.run_sync(call.turn_of, response)

    def _salt(self, server: Server) -> int | None:
        """Return the version that salts the server's cache now; a request that waited out a weight update gets the new one."""
        return server.weights.required if self.fleet.settings.cache_salt is CacheSalt.VERSION else None

    def _stream(self) -> StreamDecoder | None:
        if self.on_progress is None and self.on_tokens is None:
            return None
        return StreamDecoder(self.request, self.on_progress or ignore_progress, self.on_tokens)

    async def _connect(self, server: Server) -> Exchange | None:
        """Open a connection; None: the server cannot be reached, and is lost."""
        try:
            return await server.work.open()
        except NotConnected as error:
            if error.ours:
                raise ServerError(f"{error}; the limit is this machine's, not the server's") from error
            server.tell(Told(Event.UNREACHABLE, why=str(error)))
            return None

    def _told(self, call: Call, turn: Turn) -> Turn:
        """Return the turn, once it was compared with the version that its server should have."""
        weights = call.server.standing.weights
        if weights.required is not None and weights.names_numbers and turn.weight_version != weights.now.version:
            call.server.tell(Told(Event.DOUBTED))
        return turn

    async def _exchange(self, call: Call, exchange: Exchange) -> Response | None:
        """Send and receive; None if a reused connection ended before one byte of the answer.

        However it ends without an answer after the whole request has gone out, the request is left (see ``leave``) before the
        exception goes on: Cancelled, a broken answer, an exception of ``on_tokens``.
        """
        server = call.server
        exchange.limit_body(self.request.answer_limit)
        if call.stream is not None:
            exchange.observe(EVENT_STREAM, call.stream.feed)
        server.requests += 1
        try:
            body = self.request.body(call.rid, self._salt(server))
            if not exchange.send_now(post_request(server.generate_head, body)):
                await exchange.send_rest()
            server.sent += 1
            try:
                return await exchange.receive()
            except BaseException as error:
                await self._give_up(call, exchange, error)  # noqa: ASYNC102  the calls in it shield and bound themselves
                raise
            finally:
                server.sent -= 1
        except ConnectionBroken as error:
            if error.answered and not exchange.sent:
                await abort_once(server, call.rid, abort_s=self.abort_s)  # noqa: ASYNC120  the call shields and bounds itself
            if exchange.reused and not error.answered:
                return None
            raise call.lost(str(error)) from error
        except BadResponse as error:
            raise ServerError(f"{call.attempted}: {error}") from error

    async def _give_up(self, call: Call, exchange: Exchange, error: BaseException) -> None:
        """See that a request that was sent runs no more; blocks at most ``abort_s``, whatever is cancelled."""
        if isinstance(error, ConnectionBroken) and exchange.reused and not error.answered:
            # Most likely the server had closed the connection before: the request is sent again at once.
            await abort_once(call.server, call.rid, abort_s=self.abort_s)
            return
        call.unwatch()
        await leave(self.fleet, call.server, call.rid, exchange, abort_s=self.abort_s)
        if isinstance(error, trio.Cancelled):
            self._count_late(call, exchange.response)

    def _count_late(self, call: Call, response: Response | None) -> None:
        """Count an answer that came after its request was cancelled and that is complete; its tokens are not used."""
        if response is None:
            return
        try:
            turn = call.turn_now(response)
        except ServerError:
            return
        if turn is not None:
            self.fleet.late += turn.stop is not Stop.ABORT
        else:
            self.fleet.late += not says_abort(call.undecoded(response))

    def _note_busy(self, server: Server, busy: ServerBusy) -> None:
        settings = self.fleet.settings
        self._refusals += 1
        delay = backoff_s(
            self._refusals,
            base=settings.backoff_base,
            longest=settings.backoff_max,
            jitter=0.5,
            rng=self.fleet.ports.random,
        )
        if busy.retry_after is not None:
            delay = max(delay, min(busy.retry_after, settings.retry_after_max))
        server.busy_until = max(server.busy_until, trio.current_time() + delay)

    async def _wait_while_busy(self) -> None:
        """Wait until a usable server is not busy. If no server is usable, do not wait here."""
        until = [server.busy_until for server in self.fleet.roster.usable]
        left = min(until, default=0.0) - trio.current_time()
        if self._refusals and left > 0:
            with self.while_waiting():
                await wait_s(left)
