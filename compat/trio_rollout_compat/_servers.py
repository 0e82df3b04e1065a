"""SGLang servers that are reached through an asyncio HTTP client: aiohttp, httpx on asyncio, or the user's own.

Everything above the HTTP exchange is the native client: choice of a server, deadlines, aborts, weight updates, probes. Below it is
a connection that turns the bytes of a request into one call of the user's client, and its answer back into bytes. Decision:
docs/decisions/0018-asyncio-servers-are-opened.md.
"""

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol, final

import attrs
import trio

from trio_rollout.lowlevel import Address, Condition, open_service_nursery
from trio_rollout.sglang import SGLangServers, open_sglang_servers

from .bridge import Bridge
from .bridge._errors import described

_HEAD_END: Final = b"\r\n\r\n"


@attrs.frozen
class Answer:
    """A client's answer, with the whole body, decoded from its content encoding."""

    status: int
    body: bytes
    headers: Mapping[str, str] = attrs.field(factory=dict)


class AsyncioClient(Protocol):
    """An asyncio HTTP client: one request, one whole answer."""

    def __call__(self, method: str, url: str, headers: Mapping[str, str], body: bytes, /) -> Awaitable[Answer]:
        """Send the request, on the bridge's loop. Must have no timeout. Any exception counts as a broken connection."""
        ...


@final
@attrs.define(eq=False)
class _BridgedConnection:
    """On Trio's thread: a ``Connection`` for one exchange. Bytes of a request go in, bytes of an answer come out."""

    _address: Address
    _client: AsyncioClient
    _bridge: Bridge
    _nursery: trio.Nursery
    _request: bytearray = attrs.field(factory=bytearray, init=False)
    _answer: bytearray = attrs.field(factory=bytearray, init=False)
    _broken: OSError | None = attrs.field(default=None, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    def send_now(self, data: bytes | memoryview, /) -> int:
        if self._broken is not None or self._closed:
            raise self._broken or BrokenPipeError("closed")
        self._request += data
        head, end, body = bytes(self._request).partition(_HEAD_END)
        if end:
            method, path, headers = _parsed(head)
            if len(body) >= int(headers.get("content-length", "0")):
                self._request.clear()
                self._nursery.start_soon(self._exchange, method, path, headers, body)
        return len(data)

    def recv_into_now(self, buffer: bytearray | memoryview, /) -> int | None:
        if self._answer:
            count = min(len(buffer), len(self._answer))
            buffer[:count] = self._answer[:count]
            del self._answer[:count]
            return count
        if self._broken is not None:
            raise self._broken
        return None

    async def wait_readable(self) -> None:
        await self._changed.wait_until(lambda: bool(self._answer) or self._broken is not None or self._closed)

    async def wait_writable(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._closed = True
        self._scope.cancel()
        self._changed.notify()

    async def _exchange(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        scheme = "https" if self._address.tls else "http"
        url = f"{scheme}://{self._address.host_header}{path}"
        with self._scope:
            try:
                self._answer += _encoded(await self._bridge.call_keeping(self._client, method, url, headers, body))
            except Exception as error:  # ruff: ignore[blind-except]  the boundary to the user's client: a broken connection
                self._broken = ConnectionError(described(error))
                self._broken.__cause__ = error
        self._changed.notify()


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    pairs = (line.partition(":") for line in lines)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _encoded(answer: Answer) -> bytes:
    kept = {name.lower(): value for name, value in answer.headers.items()}
    # Closed after one exchange: the client decides which sockets are reused, so no failure may look like a stale socket's.
    lines = [f"HTTP/1.1 {answer.status} {_phrase(answer.status)}", "connection: close"]
    lines.append(f"content-length: {len(answer.body)}")
    lines += [f"{name}: {kept[name]}" for name in ("content-type", "retry-after") if name in kept]
    return "\r\n".join(lines).encode("latin-1") + _HEAD_END + answer.body


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown"


@asynccontextmanager
async def open_asyncio_servers(
    urls: Sequence[str], client: AsyncioClient, *, bridge: Bridge, **more: Any
) -> AsyncGenerator[SGLangServers]:
    """Like ``open_sglang_servers``, with every HTTP exchange made by an asyncio client on the bridge's loop.

    ``client`` is an async function ``(method, url, headers, body) -> Answer``; it must not have a short timeout: the engine's
    deadlines cancel it. ``aiohttp_client`` and ``httpx_client`` make one. ``more`` is passed on. An answer is read whole, so a
    streamed answer shows no progress before its end: ``Deadlines.no_progress`` needs the native client.

    Entering and leaving block as those of ``open_sglang_servers`` do.

    Raises:
      SettingsError, ServerError: as ``open_sglang_servers``.
    """

    async def connect(nursery: trio.Nursery, address: Address) -> _BridgedConnection:
        await trio.lowlevel.checkpoint()
        return _BridgedConnection(address, client, bridge, nursery)

    async with (
        open_service_nursery() as nursery,
        open_sglang_servers(urls, connect=partial(connect, nursery), **more) as servers,
    ):
        yield servers


def aiohttp_client(session: Any) -> AsyncioClient:
    """Return a client over an ``aiohttp.ClientSession`` of the bridge's loop; give it ``timeout=ClientTimeout(total=None)``."""

    async def send(method: str, url: str, headers: Mapping[str, str], body: bytes, /) -> Answer:
        async with session.request(method, url, headers=_sent(headers), data=body) as response:
            return Answer(response.status, await response.read(), dict(response.headers))

    return send


def httpx_client(client: Any) -> AsyncioClient:
    """Return a client over an ``httpx.AsyncClient`` that is used on the bridge's loop only; give it ``timeout=None``."""

    async def send(method: str, url: str, headers: Mapping[str, str], body: bytes, /) -> Answer:
        response = await client.request(method, url, headers=_sent(headers), content=body)
        return Answer(response.status_code, response.content, dict(response.headers))

    return send


def _sent(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of the request itself; those of the connection are the client's."""
    return {name: value for name, value in headers.items() if name in {"content-type", "authorization", "accept"}}
