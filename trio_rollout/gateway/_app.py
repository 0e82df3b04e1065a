"""The gateway as an ASGI application: its routes, and the answer to each request.

A request goes down this module from top to bottom. ``App`` finds the route, and ``_Endpoint`` turns every failure into an
answer. A handler of ``App`` finds the session and reads the request; ``_TurnReply`` sends the turn's answer, whole or as a
stream. ``Exchange`` is the request and its answer as ASGI messages.

``/s/{session}`` is the root of a session. Each API is served with and without ``/v1`` in front: OpenAI's clients want a
base URL with it, Anthropic's one without, so one base URL serves both.

The reasons are in docs/decisions/0040-a-request-of-an-agent-meets-one-endpoint.md.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, final

import attrs
import msgspec
import trio
from starlette.routing import Route, Router

from .._util.threads import RunSync
from .._util.user_code import ends_the_process
from ..errors import SessionClosed
from ._anthropic import Messages
from ._openai_chat import ChatCompletions
from ._openai_responses import Responses
from ._protocol import NO_RETRY, RETRY, AgentProtocol, Refusal, refusal_of
from ._session import GatewaySession, SessionDirectory
from ._settings import GatewaySettings
from ._turn import AgentTurn
from ._values import ChatRequest

AsgiScope: TypeAlias = MutableMapping[str, Any]
AsgiReceive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Handler: TypeAlias = "Callable[[Exchange, AgentProtocol], Awaitable[None]]"

_LOGGER: Final = logging.getLogger("trio_rollout.gateway")
_LONGEST_KEY: Final = 256
_LARGE_BODY: Final = 256 * 1024  # bytes; decoding takes some milliseconds
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"


@final
@attrs.define(eq=False)
class App:
    """The ASGI application of one gateway."""

    _directory: SessionDirectory
    settings: GatewaySettings
    _run_sync: RunSync
    requests: int = attrs.field(default=0, init=False)
    """Requests that are being answered."""
    _router: Router = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # A redirect would go to the host that the request names, before its key was looked at.
        default = _Endpoint(self, self._not_found)
        self._router = Router(routes=list(self._routes()), default=default, redirect_slashes=False)

    def _routes(self) -> Iterator[Route]:
        chat, messages, responses = ChatCompletions(), Messages(), Responses()
        yield self._get("/", self._hello)
        for root in ("/s/{session}", "/s/{session}/v1"):
            yield self._get(root, self._hello)
            yield self._get(f"{root}/", self._hello)
            yield self._post(f"{root}/chat/completions", self._turn, chat)
            yield self._post(f"{root}/responses", self._turn, responses)
            yield self._post(f"{root}/messages", self._turn, messages)
            yield self._post(f"{root}/messages/count_tokens", self._count_tokens, messages)
            yield self._get(f"{root}/models", self._models)
            yield self._get(f"{root}/models/{{model:path}}", self._model)

    def _get(self, path: str, handler: Handler) -> Route:
        return Route(path, _Endpoint(self, handler, ("GET", "HEAD")))

    def _post(self, path: str, handler: Handler, protocol: AgentProtocol) -> Route:
        return Route(path, _Endpoint(self, handler, ("POST",), protocol))

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

    async def _turn(self, exchange: "Exchange", protocol: AgentProtocol) -> None:
        """Answer a request for a turn: chat completions, messages, responses."""
        session = self._session(exchange)
        request = await self._request(exchange, protocol, session)
        with session.turn_for(attrs.evolve(request, key=exchange.header("idempotency-key"))) as turn:
            reply = _TurnReply(exchange, protocol, request, turn, self.settings)
            await exchange.while_connected(reply.stream if request.stream else reply.whole)

    async def _count_tokens(self, exchange: "Exchange", protocol: AgentProtocol) -> None:
        session = self._session(exchange)
        count = await session.count_tokens(await self._request(exchange, protocol, session))
        await exchange.reply(200, {"input_tokens": count})

    async def _models(self, exchange: "Exchange", _protocol: AgentProtocol) -> None:
        self._session(exchange)
        name = self.settings.model
        page = {"has_more": False, "first_id": name, "last_id": name}
        await exchange.reply(200, {"object": "list", "data": [_model_card(name)], **page})

    async def _model(self, exchange: "Exchange", _protocol: AgentProtocol) -> None:
        """Describe a model of any name: a turn takes any name too."""
        self._session(exchange)
        await exchange.reply(200, _model_card(exchange.scope["path_params"]["model"]))

    async def _hello(self, exchange: "Exchange", _protocol: AgentProtocol) -> None:
        await exchange.reply(200, {"status": "ok"})

    async def _not_found(self, exchange: "Exchange", _protocol: AgentProtocol) -> None:
        await trio.lowlevel.checkpoint()
        raise Refusal(404, f"there is nothing at {exchange.scope['path']!r:.200}")

    def _session(self, exchange: "Exchange") -> GatewaySession:
        """Return the session in the request's path, if the request has its key.

        Raises:
          Refusal: 404 for an unknown session, 401 for another key, 503 for a session that is closed.
        """
        name = exchange.scope["path_params"]["session"]
        key = self._directory.key_of(name)
        if key is None:
            raise Refusal(404, "no such session")
        given = (exchange.header("x-api-key"), _bearer(exchange.header("authorization")))
        if not any(hmac.compare_digest(key.encode(), one[:_LONGEST_KEY].encode()) for one in given):
            raise Refusal(401, "the key does not belong to this session")
        session = self._directory.find(name)
        if session is None or session.is_closing:
            raise Refusal(503, "session closed")
        return session

    async def _request(self, exchange: "Exchange", protocol: AgentProtocol, session: GatewaySession) -> ChatRequest:
        """Read and decode a request. A large one is decoded in a thread."""
        body = await exchange.body(most=self.settings.max_body, seconds=self.settings.body_seconds)
        if len(body) > _LARGE_BODY:
            return await self._run_sync(protocol.request, body, session.answer_of, session.image)
        return protocol.request(body, session.answer_of, session.image)


def _model_card(name: str) -> dict[str, object]:
    """Return a model's description, with the fields of OpenAI's API and those of Anthropic's."""
    openai: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "trio_rollout"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


@final
@attrs.frozen(eq=False)
class _Endpoint:
    """The ASGI application behind one route: call the handler, and turn its failure into an answer.

    ``methods`` are those allowed, all if there are none. ``protocol`` is the route's, or None where clients of every
    protocol come: a header then says which it is. An object and not a function, because Starlette calls a function in its own way.
    """

    app: App
    handler: Handler
    methods: Sequence[str] = ()
    protocol: AgentProtocol | None = None

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        exchange = Exchange(scope, receive, send)
        protocol = self.protocol or (Messages() if exchange.header("anthropic-version") else ChatCompletions())
        try:
            self._refuse_if_busy()
            exchange.require_one_framing()
            self._refuse_other_methods(scope["method"])
            await self.handler(exchange, protocol)
        except BaseException as error:  # noqa: ASYNC103  a parser may be the user's, and raise any class
            if ends_the_process(error):
                raise
            refusal = refusal_of(error)
            if not isinstance(error, Refusal | SessionClosed):
                _LOGGER.warning("a request was refused with %s", refusal.status, exc_info=error)
            if not exchange.started:
                await exchange.skip_body(seconds=self.app.settings.body_seconds)  # noqa: ASYNC102  a real cancellation was raised again above, or the call shields and bounds itself
                await exchange.refuse(refusal, protocol)  # noqa: ASYNC102  a real cancellation was raised again above, or the call shields and bounds itself

    def _refuse_if_busy(self) -> None:
        most = self.app.settings.max_requests
        if self.app.requests > most:
            raise Refusal(503, f"too many requests at once: at most {most}", RETRY)

    def _refuse_other_methods(self, method: str) -> None:
        if self.methods and method not in self.methods:
            names = ", ".join(self.methods)
            raise Refusal(405, f"the method must be {names}", {**NO_RETRY, "allow": names})


@final
@attrs.frozen(eq=False)
class _TurnReply:
    """The answer to one request for a turn.

    A turn counts once its answer was delivered: docs/decisions/0013-a-turn-of-a-session-counts-when-it-is-delivered.md.
    """

    exchange: "Exchange"
    protocol: AgentProtocol
    request: ChatRequest
    turn: AgentTurn
    settings: GatewaySettings

    async def whole(self) -> None:
        """Wait for the turn's end and send its answer or its error."""
        await self.turn.wait_over()
        if self.turn.answer is None:
            await self.exchange.refuse(self._refusal(), self.protocol)
            return
        body = self.protocol.answer(self.turn.answer, self.request)
        await self._deliver(partial(self.exchange.reply, 200, body))

    async def stream(self) -> None:
        """Send the answer while it is sampled.

        Nothing is sent before there is text to show, or the heartbeat's time is over: until then an error can have its own
        status. After that an event without content is sent whenever nothing came for the heartbeat's time, as while a tool
        call is sampled.
        """
        turn, exchange = self.turn, self.exchange
        await self._more(0)
        if turn.answer is None and turn.error is not None:
            await exchange.refuse(self._refusal(), self.protocol)
            return
        writer = self.protocol.stream(turn.id, self.request)
        await exchange.begin_events()
        await exchange.events(writer.begin())
        thoughts = text = ""
        while not turn.is_over:
            more_thoughts, thoughts = turn.streaming.thoughts[len(thoughts) :], turn.streaming.thoughts
            more_text, text = turn.streaming.text[len(text) :], turn.streaming.text
            data = writer.thoughts(more_thoughts) if more_thoughts else b""
            await exchange.events(data + (writer.text(more_text) if more_text else b""))
            if not await self._more(len(thoughts) + len(text)):
                await exchange.events(writer.keep_alive())
        if turn.answer is None:
            await exchange.events(writer.fail(self._refusal()), last=True)
            return
        end = writer.end(turn.answer, turn.answer.text[len(text) :], turn.answer.reasoning[len(thoughts) :])
        await self._deliver(partial(exchange.events, end, last=True))

    async def _more(self, shown: int) -> bool:
        """Wait until more than ``shown`` characters may be shown, or for the turn's end; False after the heartbeat's time."""
        with trio.move_on_after(self.settings.heartbeat) as limit:
            await self.turn.wait_for_more(shown)
        return not limit.cancelled_caught

    async def _deliver(self, send: Callable[[], Awaitable[None]]) -> None:
        """Send the end of the answer, and count the turn as delivered.

        It does not count if the client was seen to leave before, or reads nothing for ``GatewaySettings.send_seconds``.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.move_on_after(self.settings.send_seconds, shield=True) as limit:
            await send()
        self.turn.delivered = self.turn.delivered or not limit.cancelled_caught

    def _refusal(self) -> Refusal:
        return refusal_of(self.turn.error or SessionClosed("session closed"))


@final
@attrs.define(eq=False)
class Exchange:
    """One HTTP request and its answer, as ASGI messages."""

    scope: AsgiScope
    _receive: AsgiReceive
    _send: AsgiSend
    started: bool = attrs.field(default=False, init=False)
    """True once the head of the answer was sent."""
    _read: bool = attrs.field(default=False, init=False)

    def header(self, name: str) -> str:
        """Return the request's header of this lower-case name; empty if there is none."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key.lower() == wanted), "")

    def require_one_framing(self) -> None:
        """Refuse a request that frames its body in two ways: a proxy may have believed the other one."""
        if self.header("transfer-encoding") and self.header("content-length"):
            headers = {**NO_RETRY, "connection": "close"}
            raise Refusal(400, "the request has both transfer-encoding and content-length", headers)

    async def body(self, *, most: int, seconds: float) -> bytes:
        """Read the request's body.

        Raises:
          Refusal: the body is too large (413), does not arrive whole and in time (408), or is compressed (415).
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
                # A body that is too large is still read, and dropped: most clients read no answer before all is sent.
                too_large = too_large or len(data) + len(message.get("body", b"")) > most
                data += b"" if too_large else message.get("body", b"")
                if message.get("more_body", False):
                    continue
                if too_large:
                    raise Refusal(413, f"the body is too large: at most {most} bytes")
                return bytes(data)
        raise Refusal(413 if too_large else 408, f"the body did not arrive whole within {seconds} s and {most} bytes")

    async def skip_body(self, *, seconds: float) -> None:
        """Read the rest of the body and drop it.

        An answer to a client that still sends can be lost when the connection is closed:
        docs/decisions/0022-a-gateways-connections-are-its-own.md.
        """
        with trio.move_on_after(seconds):
            while not self._read:
                message = await self._receive()
                self._read = message["type"] == "http.disconnect" or not message.get("more_body", False)

    async def while_connected(self, answer: Callable[[], Awaitable[None]]) -> None:
        """Run ``answer``, and cancel it when the client disconnects. The request must have been read."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_gone, nursery.cancel_scope)
            await answer()
            nursery.cancel_scope.cancel()

    async def _cancel_when_gone(self, scope: trio.CancelScope) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        scope.cancel(reason="the client has gone")

    async def refuse(self, refusal: Refusal, protocol: AgentProtocol) -> None:
        """Send an error in the protocol's shape."""
        await self.reply(refusal.status, protocol.error(refusal), refusal.headers)

    async def reply(self, status: int, content: object, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete JSON answer."""
        data = msgspec.json.encode(content)
        await self._start(status, _JSON, {**(headers or {}), "content-length": str(len(data))})
        await self._send({"type": "http.response.body", "body": data})

    async def begin_events(self) -> None:
        """Send the head of a stream of events."""
        await self._start(200, _EVENTS, {"cache-control": "no-cache"})

    async def events(self, data: bytes, *, last: bool = False) -> None:
        """Send events; ``last`` ends the stream."""
        if data or last:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(b"content-type", content_type.encode())]
        pairs += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
