"""The routes of a tiny server, and the one place where a failure becomes an HTTP answer."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, final

import attrs
import trio

from .._http.server import ClientGone, ServerConnection
from .._http.server_reader import Request as HttpRequest
from ._control import Control
from ._generate import Generate
from ._identity import Identity
from ._refusal import Refusal

_LOGGER = logging.getLogger("trio_rollout.tiny")
_TEXT = "text/plain; charset=utf-8"

Handler: TypeAlias = Callable[[ServerConnection, HttpRequest], Awaitable[None]]
Routes: TypeAlias = Mapping[str, tuple[frozenset[str], Handler]]

_GET = frozenset({"GET", "HEAD"})
_POST = frozenset({"POST"})
_EITHER = frozenset({"GET", "POST"})


@final
@attrs.frozen(kw_only=True, eq=False)
class App:
    """Finds the handler of a request, and answers for a handler that fails."""

    generate: Generate
    control: Control
    identity: Identity
    _routes: Routes = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_routes", self._table())

    def _table(self) -> Routes:
        control = self.control
        return {
            "/generate": (frozenset({"POST", "PUT"}), self.generate),
            "/abort_request": (_POST, control.abort),
            "/pause_generation": (_POST, control.pause),
            "/continue_generation": (_POST, control.resume),
            "/update_weights_from_disk": (_POST, control.update_from_disk),
            "/update_weight_version": (_POST, control.update_version),
            "/flush_cache": (_EITHER, control.flush),
            "/release_memory_occupation": (_EITHER, control.nothing),
            "/resume_memory_occupation": (_EITHER, control.nothing),
            "/parse_function_call": (_POST, control.parse_function_call),
            "/separate_reasoning": (_POST, control.separate_reasoning),
            "/slow_down": (_EITHER, control.slow_down),
            "/ready": (_GET, control.ready),
            "/ping": (_GET, control.ping),
            "/health": (_GET, control.health),
            "/health_generate": (_GET, control.health),
            "/model_info": (_GET, self._model_info),
            "/get_model_info": (_GET, self._model_info),
            "/server_info": (_GET, self._server_info),
            "/get_server_info": (_GET, self._server_info),
            "/v1/loads": (_GET, self._loads),
            "/v1/models": (_GET, self._models),
            "/": (_GET, self._root),
        }

    async def answer(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Answer one request."""
        methods, handler = self._routes.get(request.path, (frozenset[str](), self._root))
        if not methods:
            await connection.reply_json(404, {"detail": "Not Found"})
        elif request.method not in methods:
            await connection.reply_json(405, {"detail": "Method Not Allowed"})
        else:
            await self._guarded(handler, connection, request)

    async def _guarded(self, handler: Handler, connection: ServerConnection, request: HttpRequest) -> None:
        try:
            await handler(connection, request)
        except Refusal as refusal:
            await connection.reply_json(refusal.status, refusal.body)
        except (ClientGone, trio.BrokenResourceError, trio.ClosedResourceError):
            raise
        except Exception:
            if connection.in_stream:
                raise
            _LOGGER.exception("%s %s failed", request.method, request.path)
            await connection.reply(500, b"Internal Server Error", _TEXT)

    async def _model_info(self, connection: ServerConnection, _request: HttpRequest) -> None:
        await connection.reply_json(200, self.identity.model_info(self.control.frontend.scheduler.version))

    async def _server_info(self, connection: ServerConnection, _request: HttpRequest) -> None:
        await connection.reply_json(200, self.identity.server_info(self.control.frontend))

    async def _loads(self, connection: ServerConnection, _request: HttpRequest) -> None:
        await connection.reply_json(200, self.identity.loads(self.control.frontend))

    async def _models(self, connection: ServerConnection, _request: HttpRequest) -> None:
        name = self.identity.served_model_name
        longest = self.control.frontend.settings.context_length
        card = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "sglang",
            "root": name,
            "max_model_len": longest,
        }
        await connection.reply_json(200, {"object": "list", "data": [card]})

    async def _root(self, connection: ServerConnection, _request: HttpRequest) -> None:
        await connection.reply_json(200, "SGLang is running")
