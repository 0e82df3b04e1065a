"""One generate call: tries on servers, one after the other, until there is a Turn or a reason why there is none."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import attrs
import trio

from .._core.sampling import SamplingParams
from .._core.server import Event, Told
from .._core.values import Turn
from .._http import EVENT_STREAM, BadResponse, ConnectionBroken, Exchange, NotConnected, Response, post_request
from .._util.time import backoff_s, wait_s
from ..abc import ModelInput, OnTokens
from ..errors import ServerBusy, ServerError
from ._call import Call
from ._cancellation import abort_once, close_unanswered, count_late, look_s, read_on
from ._fleet import Fleet
from ._server import Server
from ._wire import GenerateRequest, StreamDecoder, nothing_moved


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
    moved: Callable[[], None] | None = None
    on_tokens: OnTokens | None = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    request: GenerateRequest = attrs.field(init=False)
    _refusals: int = attrs.field(default=0, init=False)

    async def run(self) -> Turn:
        """Try until there is an answer; see ``InferenceServers.generate``."""
        fleet = self.fleet
        streams = self.moved is not None or self.on_tokens is not None
        self.request = fleet.requests.encode(self.input_ids, self.sampling, self.extra, stream=streams)
        while True:
            server = fleet.choose_now(self.affinity)
            if server is None:
                with self.waiting():
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
        """One try on this server; None: nothing was sent, or the server had closed the connection before it could answer."""
        exchange = server.work.take_idle()
        while True:
            if exchange is None:
                exchange = await self._connect(server)
                if exchange is None:
                    return None
            with exchange:
                if not server.usable:  # paused or lost while the connection was opened
                    return None
                call = Call(server, self.fleet.ports.new_rid(), self.request, server.weights.now, self._stream())
                response = await self._exchange(call, exchange)
            if response is not None:
                turn = self.fleet.decoding.turn_now(call, response)
                return self._told(call, turn or await self.fleet.decoding.turn(call, response))
            exchange = None  # that one was stale, which a new connection never is

    def _stream(self) -> StreamDecoder | None:
        if self.moved is None and self.on_tokens is None:
            return None
        return StreamDecoder(self.moved or nothing_moved, self.on_tokens)

    async def _connect(self, server: Server) -> Exchange | None:
        """A new connection; None: the server can't be reached, and is lost."""
        try:
            return await server.work.open()
        except NotConnected as error:
            if error.ours:
                raise ServerError(f"{error}; the limit is this machine's, not the server's") from error
            server.tell(Told(Event.UNREACHABLE, why=str(error)))
            return None

    def _told(self, call: Call, turn: Turn) -> Turn:
        """The turn, once the fleet has seen which version it names."""
        weights = call.server.weights
        if weights.required is not None and weights.names_numbers and turn.weight_version != weights.now.version:
            call.server.tell(Told(Event.DOUBTED))
        return turn

    async def _exchange(self, call: Call, exchange: Exchange) -> Response | None:
        """Send and receive; None if a reused connection ended before one byte of the answer."""
        server = call.server
        if call.stream is not None:
            exchange.observe(EVENT_STREAM, call.stream.feed)
        server.requests += 1
        try:
            if not exchange.send_now(post_request(server.generate_head, self.request.body(call.rid))):
                await exchange.send_rest()
            server.sent += 1
            try:
                return await exchange.receive()
            except trio.Cancelled:
                call.unwatch()
                with trio.move_on_after(self.abort_s - look_s(self.abort_s), shield=True):
                    await read_on(call, exchange)
                raise
            finally:
                server.sent -= 1
        except ConnectionBroken as error:
            with trio.move_on_after(self.abort_s, shield=True):
                if exchange.sent or error.answered:
                    await abort_once(server, call.rid)
            if exchange.reused and not error.answered:
                return None
            raise call.lost(str(error)) from error
        except BadResponse as error:
            raise ServerError(f"{call.attempted}: {error}") from error
        except trio.Cancelled:
            if exchange.sent and exchange.response is None:
                with trio.move_on_after(look_s(self.abort_s), shield=True):
                    await close_unanswered(self.fleet, call, exchange)
            count_late(self.fleet, call, exchange)
            raise

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
        """Wait until some usable server is not busy; no server usable is not a reason to wait here."""
        until = [server.busy_until for server in self.fleet.roster.usable]
        left = min(until, default=0.0) - trio.current_time()
        if self._refusals and left > 0:
            with self.waiting():
                await wait_s(left)
