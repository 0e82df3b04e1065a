"""The gateway's HTTP side: routes, keys, limits, and the one place that turns a failure into an answer.

``/s/{session}`` is a session's own root. Each API is there with and without ``/v1`` in front: OpenAI's clients want a base
URL with it, Anthropic's one without, so that one base URL serves both.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol, TypeAlias, final

import attrs
import trio
from starlette.routing import Route, Router

from ..errors import SessionClosed
from ._anthropic import Messages
from ._exchange import AsgiReceive, AsgiScope, AsgiSend, Exchange
from ._openai_chat import ChatCompletions
from ._openai_responses import Responses
from ._protocol import AgentProtocol
from ._refusal import RETRY, Refusal, refusal_of
from ._session import GatewaySession
from ._settings import GatewaySettings
from ._turn import SessionTurn
from ._values import ChatRequest

_LOGGER: Final = logging.getLogger("trio_rollout.sessions")
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
        self._router = Router(routes=self._routes())

    def _routes(self) -> list[Route]:
        chat, messages = ChatCompletions(), Messages()
        routes = [Route("/", _Endpoint(_hello), methods=["GET"])]
        for root in ("/s/{session}", "/s/{session}/v1"):
            routes += [
                Route(root, _Endpoint(_hello), methods=["GET"]),
                Route(f"{root}/", _Endpoint(_hello), methods=["GET"]),
                self._route(f"{root}/chat/completions", chat, _Turns(chat, self._settings)),
                self._route(f"{root}/responses", Responses(), _Turns(Responses(), self._settings)),
                self._route(f"{root}/messages", messages, _Turns(messages, self._settings)),
                self._route(f"{root}/messages/count_tokens", messages, _CountTokens(messages, self._settings)),
                self._route(f"{root}/models", chat, self._models, method="GET"),
            ]
        return routes

    def _route(self, path: str, protocol: AgentProtocol, answerer: Answerer, *, method: str = "POST") -> Route:
        async def answer(exchange: Exchange) -> None:
            await self._guarded(exchange, protocol, answerer)

        return Route(path, _Endpoint(answer), methods=[method])

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Answer one request."""
        self.requests += 1
        try:
            await self._router(scope, receive, send)
        finally:
            self.requests -= 1

    async def _guarded(self, exchange: Exchange, protocol: AgentProtocol, answerer: Answerer) -> None:
        await trio.lowlevel.checkpoint()
        try:
            self._refuse_if_busy()
            await answerer(exchange, self._session(exchange))
        except Exception as error:
            refusal = refusal_of(error)
            if not isinstance(error, Refusal | SessionClosed):
                _LOGGER.warning("a request was refused with %s", refusal.status, exc_info=error)
            if not exchange.started:
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
        given = exchange.header("x-api-key") or exchange.header("authorization").removeprefix("Bearer ").strip()
        if key is None:
            raise Refusal(404, "no such session")
        if not hmac.compare_digest(key.encode(), given[:_LONGEST_KEY].encode()):
            raise Refusal(401, "the key is not that of this session")
        session = self._sessions.find(name)
        if session is None or session.is_closing:
            raise Refusal(503, "session closed")
        return session

    async def _models(self, exchange: Exchange, _session: GatewaySession) -> None:
        name = self._settings.model
        both = {"id": name, "object": "model", "created": 0, "owned_by": "trio_rollout"}
        both |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        page = {"has_more": False, "first_id": name, "last_id": name}
        await exchange.reply(200, {"object": "list", "data": [both], **page})


async def _hello(exchange: Exchange) -> None:
    await exchange.reply(200, {"status": "ok"})


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
        await exchange.reply(200, {"input_tokens": session.count_tokens(self.protocol.request(body))})


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
