"""The gateway's HTTP server: Hypercorn's connections on Trio, each a task that ends with its client.

HTTP is Hypercorn's; the connections are the gateway's, in a subclass of Hypercorn's ``TCPServer``. Hypercorn's ``serve``
keeps a connection that its client has closed until the keep-alive time is over, and that time has to be long here: an
agent may run a tool for minutes between two turns. Seen with ``serve``: a socket and three tasks were left for ten minutes
by every agent that exited, and one malformed packet ended the whole server. The four reasons, with their measurements:
docs/decisions/0022-a-gateways-connections-are-its-own.md.
"""

import logging
import math
import re
import resource
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, final

import attrs
import msgspec
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState

from ._app import App
from ._settings import GatewaySettings

_LOGGER: Final = logging.getLogger("trio_rollout.gateway")
# Between two requests of an agent lies a tool call; a connection that was closed meanwhile costs the agent a retry.
_KEEP_ALIVE_S = 600.0
_FIRST_READ_S: Final = 1.0
_MOST_READ: Final = 2**16  # bytes at once, as Hypercorn reads
_BARE_LINE_FEED: Final = re.compile(rb"(?<!\r)\n")


def _answer(status: str, message: str, *headers: str) -> bytes:
    """Return an answer to a request that no application sees: the shape has what both vendors' clients look for."""
    body = msgspec.json.encode({"type": "error", "error": {"type": "invalid_request_error", "message": message}})
    lines = [status, "content-type: application/json", "connection: close", f"content-length: {len(body)}", *headers]
    return "\r\n".join(["HTTP/1.1 " + lines[0], *lines[1:], "", ""]).encode() + body


_FULL: Final = _answer("503 ", "too many connections at once", "retry-after: 1", "x-should-retry: true")
_BARE: Final = _answer("400 ", "a line of the head ends without a carriage return", "x-should-retry: false")


@final
@attrs.define(eq=False)
class Connections:
    """The open connections of one gateway, at most ``most``."""

    most: int
    count: int = attrs.field(default=0, init=False)
    idle: "dict[_Connection, None]" = attrs.field(factory=dict, init=False)
    """The connections on which nothing is asked, the oldest first."""

    @contextmanager
    def room(self) -> Generator[bool]:
        """Count a connection for the length of the block; yield False if there is no room, even by closing an idle one."""
        self.count += 1
        try:
            if self.count > self.most and self.idle:
                oldest = next(iter(self.idle))
                del self.idle[oldest]
                oldest.quiet.cancel(reason="a new connection needs room")
                yield True
            else:
                yield self.count <= self.most
        finally:
            self.count -= 1


@final
class _Connection(TCPServer):
    """A connection that ends when its client has gone and its last answer is over.

    It also saves a third of a millisecond a request: the head of an answer is sent together with its body, and waiting for
    the next request is one scope whose deadline moves, not a task for each request.
    """

    _head = b""
    _begun = b""
    """The part of a request's head that has come."""

    def __init__(self, settings: GatewaySettings, connections: Connections, *args: Any) -> None:
        super().__init__(*args)
        self._settings = settings
        self._connections = connections
        self.quiet = trio.CancelScope(deadline=trio.current_time() + _KEEP_ALIVE_S)

    async def run(self) -> None:
        """Serve the connection. An error ends this connection only, not the gateway with its sessions."""
        with self._connections.room() as room:
            try:
                if not room:
                    with trio.move_on_after(_FIRST_READ_S):
                        await self.stream.receive_some(
                            _MOST_READ
                        )  # an answer that comes before the request may be lost
                    await self._answer_and_close(_FULL)
                    return
                self._connections.idle[self] = None
                await super().run()
            except* Exception as errors:
                _LOGGER.warning("an error of the HTTP server ended one connection", exc_info=errors)
            finally:
                self._connections.idle.pop(self, None)

    async def _answer_and_close(self, answer: bytes) -> None:
        with (
            trio.move_on_after(self._settings.send_seconds),
            suppress(trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            await self.stream.send_all(answer)
        await trio.aclose_forcefully(self.stream)

    async def _read_data(self) -> None:
        """Read until the client has gone, or sends a head with a bare line feed."""
        try:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while data := await self.stream.receive_some(_MOST_READ):
                    if self.quiet.deadline < math.inf and not self._may_begin(bytes(data)):
                        await self._answer_and_close(_BARE)
                        break
                    await self.protocol.handle(RawData(bytes(data)))
            await self.protocol.handle(Closed())
        finally:
            await self.idle_task.stop()  # noqa: ASYNC102  cancelled in there, the connection ends anyway

    def _may_begin(self, data: bytes) -> bool:
        """Take in data of a head; return False if a line of it ends without a carriage return.

        A head that has begun must end within ``body_seconds``.
        """
        if not self._begun:
            self._connections.idle.pop(self, None)
            self.quiet.deadline = min(self.quiet.deadline, trio.current_time() + self._settings.body_seconds)
        head, end, _ = (self._begun + data).partition(b"\r\n\r\n")
        self._begun = b"" if end else head[: self._settings.max_head]
        return not _BARE_LINE_FEED.search(head)

    async def _idle_timeout(self) -> None:
        self.quiet.deadline = trio.current_time() + _KEEP_ALIVE_S
        with self.quiet:
            await trio.sleep_forever()
        with trio.move_on_after(self._settings.send_seconds, shield=True):
            await self._initiate_server_close()

    async def protocol_send(self, event: Event) -> None:
        """Send an event. A head waits for the body that follows it; ``Updated`` moves the keep-alive deadline."""
        if isinstance(event, Updated):
            self.quiet.deadline = trio.current_time() + _KEEP_ALIVE_S if event.idle else math.inf
            self._begun = b""
            if event.idle:
                self._connections.idle[self] = None
            else:
                self._connections.idle.pop(self, None)
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
    """Return True if the data is just the head of an answer. An event for the end of its body always follows."""
    return data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1") and data.endswith(b"\r\n\r\n")


def _config(settings: GatewaySettings) -> Config:
    config = Config()
    config.errorlog = None
    config.h11_max_incomplete_size = settings.max_head
    config.keep_alive_timeout = _KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    config.include_server_header = False
    return config


def _most_connections(settings: GatewaySettings) -> int:
    if settings.max_connections is not None:
        return settings.max_connections
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else max(1, files // 2)


def bind(settings: GatewaySettings) -> socket.socket:
    """Return a socket that is bound to the settings' host and port.

    Raises:
      OSError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Hypercorn sends inside a shield, so the kernel has to drop a client that has stopped reading.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.send_seconds * 1000))
        bound.bind((settings.host, settings.port))
    except BaseException:
        bound.close()
        raise
    return bound


def url_of(settings: GatewaySettings, bound: socket.socket) -> str:
    """Return the URL that agents use."""
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve_app(  # noqa: ASYNC128  serve_listeners calls it
    app: App, settings: GatewaySettings, bound: socket.socket, *, task_status: trio.TaskStatus[Any]
) -> None:
    """Listen on the socket and answer requests until cancelled, which ends every connection at once."""
    bound.listen(4096)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
    state = ConnectionState(LifespanState())
    application: Any = app  # Hypercorn's types name every kind of message; the gateway handles those of HTTP
    connections = Connections(_most_connections(settings))
    handler: Any = partial(
        _Connection, settings, connections, ASGIWrapper(application), _config(settings), WorkerContext(None), state
    )
    await trio.serve_listeners(handler, [listener], task_status=task_status)
