"""One request of an agent over ASGI: read it within bounds, watch its connection, answer it.

The gateway's HTTP side: routes, keys, limits, and the one place that turns a failure into an answer.

``/s/{session}`` is a session's own root. Each API is there with and without ``/v1`` in front: OpenAI's clients want a base
URL with it, Anthropic's one without, so that one base URL serves both.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, final

import attrs
import msgspec
import trio
from starlette.routing import Route, Router

from ..errors import SessionClosed
from ._anthropic import Messages
from ._openai_chat import ChatCompletions
from ._openai_responses import Responses
from ._protocol import NO_RETRY, RETRY, AgentProtocol, Refusal, refusal_of
from ._sampling import SessionTurn
from ._session import GatewaySession
from ._settings import GatewaySettings
from ._values import ChatRequest

AsgiScope: TypeAlias = MutableMapping[str, Any]
AsgiReceive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"


@final
@attrs.define(eq=False)
class Exchange:
    """A request and its answer on one connection."""

    scope: AsgiScope
    _receive: AsgiReceive
    _send: AsgiSend
    started: bool = attrs.field(default=False, init=False)
    """Whether the head of the answer was sent."""
    _read: bool = attrs.field(default=False, init=False)

    def header(self, name: str) -> str:
        """The request's header of this lower-case name; empty if there is none."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key.lower() == wanted), "")

    async def body(self, *, most: int, seconds: float) -> bytes:
        """Read the request's body.

        Raises:
          Refusal: it is too large (413), does not come in time or whole (408), or is packed (415).

        """
        encoding = self.header("content-encoding")
        if encoding.lower() not in {"", "identity"}:
            raise Refusal(415, f"content-encoding: got {encoding!r}, allowed: identity")
        self._read = True
        data = bytearray()
        too_large = False
        with trio.move_on_after(seconds):
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    break
                # What is too large is read on and thrown away: most clients read an answer only when all is sent.
                too_large = too_large or len(data) + len(message.get("body", b"")) > most
                data += b"" if too_large else message.get("body", b"")
                if message.get("more_body", False):
                    continue
                if too_large:
                    raise Refusal(413, f"the body is too large: at most {most} bytes")
                return bytes(data)
        raise Refusal(413 if too_large else 408, f"the body did not come whole within {seconds} s and {most} bytes")

    async def skip_body(self, *, seconds: float) -> None:
        """Read a body that nobody wants: to a client that still sends, an answer may be lost with the connection."""
        with trio.move_on_after(seconds):
            while not self._read:
                message = await self._receive()
                self._read = message["type"] == "http.disconnect" or not message.get("more_body", False)

    async def while_connected(self, answer: Callable[[], Awaitable[None]]) -> None:
        """Run ``answer`` unless and until the client has gone. To be used once the request is read."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_gone, nursery.cancel_scope)
            await answer()
            nursery.cancel_scope.cancel()

    async def _until_gone(self, body: trio.CancelScope) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        body.cancel(reason="the client has gone")

    async def reply(self, status: int, content: object, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole JSON answer."""
        data = msgspec.json.encode(content)
        await self._start(status, _JSON, {**(headers or {}), "content-length": str(len(data))})
        await self._send({"type": "http.response.body", "body": data})

    async def begin_events(self) -> None:
        """Send the head of a stream."""
        await self._start(200, _EVENTS, {"cache-control": "no-cache"})

    async def events(self, data: bytes, *, last: bool = False) -> None:
        """Send events of a stream."""
        if data or last:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(b"content-type", content_type.encode())]
        pairs += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


_LOGGER: Final = logging.getLogger("trio_rollout.gateway")
_LONGEST_KEY: Final = 256

Answerer: TypeAlias = Callable[[Exchange, GatewaySession], Awaitable[None]]


class Sessions(Protocol):
    """Where the app finds sessions."""

    def find(self, session: str) -> GatewaySession | None:
        """The open session of this id."""
        ...

    def key_of(self, session: str) -> str | None:
        """The key of a session that is open or was closed lately."""
        ...


@final
@attrs.define(eq=False)
class App:
    """ASGI application over the sessions of one gateway."""

    _sessions: Sessions
    _settings: GatewaySettings
    requests: int = attrs.field(default=0, init=False)
    """How many are being answered."""
    _router: Router = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._router = Router(routes=self._routes(), default=_Endpoint(self._nowhere))

    def _routes(self) -> list[Route]:
        chat, messages, responses = ChatCompletions(), Messages(), Responses()
        routes = [self._route("/", self._hello)]
        for root in ("/s/{session}", "/s/{session}/v1"):
            routes += [
                self._route(root, self._hello),
                self._route(f"{root}/", self._hello),
                self._route(f"{root}/chat/completions", self._of_session(_Turns(chat, self._settings)), chat),
                self._route(f"{root}/responses", self._of_session(_Turns(responses, self._settings)), responses),
                self._route(f"{root}/messages", self._of_session(_Turns(messages, self._settings)), messages),
                self._route(
                    f"{root}/messages/count_tokens", self._of_session(_CountTokens(messages, self._settings)), messages
                ),
                self._route(f"{root}/models", self._of_session(self._models)),
                self._route(f"{root}/models/{{model:path}}", self._of_session(self._model)),
            ]
        return routes

    def _route(
        self, path: str, answer: Callable[[Exchange], Awaitable[None]], protocol: AgentProtocol | None = None
    ) -> Route:
        """A way in: of one protocol, which is posted to, or of none in particular, which is read."""
        methods = ("GET", "HEAD") if protocol is None else ("POST",)

        async def guarded(exchange: Exchange) -> None:
            await self._guarded(exchange, protocol or _spoken(exchange), methods, answer)

        return Route(path, _Endpoint(guarded))

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        self.requests += 1
        try:
            await self._router(scope, receive, send)
        finally:
            self.requests -= 1

    async def _nowhere(self, exchange: Exchange) -> None:
        async def answer(exchange: Exchange) -> None:
            await trio.lowlevel.checkpoint()
            raise Refusal(404, f"there is nothing at {exchange.scope['path']!r:.200}")

        await self._guarded(exchange, _spoken(exchange), (exchange.scope["method"],), answer)

    async def _guarded(
        self,
        exchange: Exchange,
        protocol: AgentProtocol,
        methods: Sequence[str],
        answer: Callable[[Exchange], Awaitable[None]],
    ) -> None:
        try:
            self._refuse_if_busy()
            _refuse_unless(exchange.scope["method"], methods)
            await answer(exchange)
        except Exception as error:
            refusal = refusal_of(error)
            if not isinstance(error, Refusal | SessionClosed):
                _LOGGER.warning("a request was refused with %s", refusal.status, exc_info=error)
            if not exchange.started:
                await exchange.skip_body(seconds=self._settings.body_seconds)
                await exchange.reply(refusal.status, protocol.error(refusal), refusal.headers)

    def _refuse_if_busy(self) -> None:
        most = self._settings.max_requests
        if self.requests > most:
            raise Refusal(503, f"too many requests at once: at most {most}", RETRY)

    def _session(self, exchange: Exchange) -> GatewaySession:
        """The session that is asked for, if the key is its own.

        Raises:
          Refusal: no such session, or not its key; with the right key, that it is closed.

        """
        name = exchange.scope["path_params"]["session"]
        key = self._sessions.key_of(name)
        if key is None:
            raise Refusal(404, "no such session")
        given = (exchange.header("x-api-key"), _bearer(exchange.header("authorization")))
        if not any(hmac.compare_digest(key.encode(), one[:_LONGEST_KEY].encode()) for one in given):
            raise Refusal(401, "the key is not that of this session")
        session = self._sessions.find(name)
        if session is None or session.is_closing:
            raise Refusal(503, "session closed")
        return session

    def _of_session(self, answerer: Answerer) -> Callable[[Exchange], Awaitable[None]]:
        async def answer(exchange: Exchange) -> None:
            await answerer(exchange, self._session(exchange))

        return answer

    async def _models(self, exchange: Exchange, _session: GatewaySession) -> None:
        name = self._settings.model
        page = {"has_more": False, "first_id": name, "last_id": name}
        await exchange.reply(200, {"object": "list", "data": [_card(name)], **page})

    async def _model(self, exchange: Exchange, _session: GatewaySession) -> None:
        """Whatever name an agent was told: a turn takes any."""
        await exchange.reply(200, _card(exchange.scope["path_params"]["model"]))

    async def _hello(self, exchange: Exchange) -> None:
        await exchange.reply(200, {"status": "ok"})


def _card(name: str) -> dict[str, object]:
    """A model as OpenAI's and as Anthropic's clients know it."""
    openai: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "trio_rollout"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _spoken(exchange: Exchange) -> AgentProtocol:
    """The protocol of a client that is where none in particular is spoken."""
    return Messages() if exchange.header("anthropic-version") else ChatCompletions()


def _refuse_unless(method: str, allowed: Sequence[str]) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise Refusal(405, f"the method must be {names}", {**NO_RETRY, "allow": names})


def _bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


@final
@attrs.frozen(eq=False)
class _Endpoint:
    """What Starlette calls for a route: anything but a function is an ASGI application to it."""

    answer: Callable[[Exchange], Awaitable[None]]

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        await self.answer(Exchange(scope, receive, send))


@final
@attrs.frozen(eq=False)
class _CountTokens:
    """``POST /v1/messages/count_tokens``."""

    protocol: AgentProtocol
    settings: GatewaySettings

    async def __call__(self, exchange: Exchange, session: GatewaySession) -> None:
        body = await exchange.body(most=self.settings.max_body, seconds=self.settings.body_seconds)
        count = await session.count_tokens(self.protocol.request(body))
        await exchange.reply(200, {"input_tokens": count})


@final
@attrs.frozen(eq=False)
class _Turns:
    """A route that asks for turns."""

    protocol: AgentProtocol
    settings: GatewaySettings

    async def __call__(self, exchange: Exchange, session: GatewaySession) -> None:
        body = await exchange.body(most=self.settings.max_body, seconds=self.settings.body_seconds)
        again = exchange.header("x-stainless-retry-count") not in {"", "0"}
        request = attrs.evolve(self.protocol.request(body), again=again)
        with session.joined(request) as turn:
            answer = self._stream if request.stream else self._whole
            await exchange.while_connected(partial(answer, exchange, turn, request))

    async def _whole(self, exchange: Exchange, turn: SessionTurn, request: ChatRequest) -> None:
        await turn.wait_over()
        if turn.answer is None:
            refusal = _refusal(turn)
            await exchange.reply(refusal.status, self.protocol.error(refusal), refusal.headers)
            return
        body = self.protocol.answer(turn.answer, request)
        await self._deliver(turn, partial(exchange.reply, 200, body))

    async def _stream(self, exchange: Exchange, turn: SessionTurn, request: ChatRequest) -> None:
        """Nothing is sent before there is something to show: until then an error can have its own status."""
        await turn.wait_for_more(0)
        if turn.answer is None and turn.error is not None:
            refusal = _refusal(turn)
            await exchange.reply(refusal.status, self.protocol.error(refusal), refusal.headers)
            return
        writer = self.protocol.stream(turn.id, request)
        await exchange.begin_events()
        await exchange.events(writer.begin())
        thoughts = shown = ""
        while not turn.is_over:
            thought, thoughts = turn.reveal.thoughts[len(thoughts) :], turn.reveal.thoughts
            delta, shown = turn.reveal.text[len(shown) :], turn.reveal.text
            data = writer.thoughts(thought) if thought else b""
            await exchange.events(data + (writer.text(delta) if delta else b""))
            await turn.wait_for_more(len(thoughts) + len(shown))
        if turn.answer is None:
            await exchange.events(writer.fail(_refusal(turn)), last=True)
            return
        end = writer.end(turn.answer, _rest(turn.answer.text, shown), _rest(turn.answer.reasoning, thoughts))
        await self._deliver(turn, partial(exchange.events, end, last=True))

    async def _deliver(self, turn: SessionTurn, send: Callable[[], Awaitable[None]]) -> None:
        """Send the end of an answer. From here on it counts, unless the client was seen to leave before or is stuck."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.move_on_after(self.settings.send_seconds, shield=True) as patience:
            await send()
        turn.delivered = turn.delivered or not patience.cancelled_caught


def _rest(text: str, shown: str) -> str:
    """What is still to be shown. A parser strips what it finds; what was shown stands at its beginning all the same."""
    return text[len(shown) :] if text.startswith(shown) else text.lstrip()[len(shown.lstrip()) :]


def _refusal(turn: SessionTurn) -> Refusal:
    return refusal_of(turn.error or SessionClosed("session closed"))
