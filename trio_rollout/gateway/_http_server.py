"""Where the gateway listens: Hypercorn's connections on Trio, one task tree each, none longer than its client.

Hypercorn's own ``serve`` is not used for one reason: it keeps a connection that its client has closed until the keep-alive
time is over, and that time has to be long here. Seen: a socket and three tasks left for ten minutes by every agent that exited.
"""

import logging
import math
import socket
from functools import partial
from typing import Any, Final, final

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState

from ._app import App
from ._settings import GatewaySettings

_LOGGER: Final = logging.getLogger("trio_rollout.gateway")
# Between two requests of an agent lies a tool call; a connection that is gone by then costs it a retry.
_KEEP_ALIVE_S = 600.0


@final
class _Connection(TCPServer):
    """One that ends when its client has gone and its last answer is over.

    It is also cheaper than Hypercorn's, a third of a millisecond a request: a head leaves together with what follows it, and
    waiting for the next request is one scope whose deadline moves, not a task for each.
    """

    _head = b""

    def __init__(self, settings: GatewaySettings, *args: Any) -> None:
        super().__init__(*args)
        self._settings = settings
        self._quiet = trio.CancelScope()

    async def run(self) -> None:
        """Serve it. Seen: a path that is not ASCII, over HTTP/2, raised through here and ended the whole gateway."""
        try:
            await super().run()
        except* Exception as errors:
            _LOGGER.warning("a connection was ended by an error of the HTTP server's", exc_info=errors)

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        finally:
            await self.idle_task.stop()  # noqa: ASYNC102  cancelled in there, the connection ends anyway

    async def _idle_timeout(self) -> None:
        self._quiet.deadline = trio.current_time() + _KEEP_ALIVE_S
        with self._quiet:
            await trio.sleep_forever()
        with trio.move_on_after(self._settings.send_seconds, shield=True):
            await self._initiate_server_close()

    async def protocol_send(self, event: Event) -> None:
        """Send, or hear whether something is being answered."""
        if isinstance(event, Updated):
            self._quiet.deadline = trio.current_time() + _KEEP_ALIVE_S if event.idle else math.inf
            return
        data, self._head = self._head, b""
        if isinstance(event, RawData):
            data += event.data
            if _is_head(event.data):
                self._head = data
                return
        if data:
            await super().protocol_send(RawData(data))
        if not isinstance(event, RawData):
            await super().protocol_send(event)


def _is_head(data: bytes) -> bool:
    """Whether it is the head of an answer, and no more: the end of its body is told to come, even if it has none."""
    return data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1") and data.endswith(b"\r\n\r\n")


def _config(settings: GatewaySettings) -> Config:
    config = Config()
    config.errorlog = None
    config.h11_max_incomplete_size = settings.max_head
    config.keep_alive_timeout = _KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    config.include_server_header = False
    return config


def bind(settings: GatewaySettings) -> socket.socket:
    """A socket where the settings say.

    Raises:
      OSError: the port is taken.

    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Hypercorn sends inside a shield; it is the kernel that gives a client up that has stopped reading.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.send_seconds * 1000))
        bound.bind((settings.host, settings.port))
    except BaseException:
        bound.close()
        raise
    return bound


def url_of(settings: GatewaySettings, bound: socket.socket) -> str:
    """How agents reach it."""
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve_app(  # noqa: ASYNC128  serve_listeners calls it
    app: App, settings: GatewaySettings, bound: socket.socket, *, task_status: trio.TaskStatus[Any]
) -> None:
    """Listen on the socket and answer until cancelled, which ends every connection at once."""
    bound.listen(4096)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
    state = ConnectionState(LifespanState())
    application: Any = app  # Hypercorn's types name every kind of message; the gateway knows those of HTTP
    handler: Any = partial(
        _Connection, settings, ASGIWrapper(application), _config(settings), WorkerContext(None), state
    )
    await trio.serve_listeners(handler, [listener], task_status=task_status)
