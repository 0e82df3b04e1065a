"""The servers under an ``httpx`` client of the user's: every request goes to one of them, over the connections of generation."""

from functools import partial
from typing import Final, final

import httpx  # noqa: ASYNC127  the client users have
import trio

from ._fleet import Fleet
from ._http import carry, library_of, limits_of
from ._server import Server

ANY: Final = "servers"
"""The host that stands for the least loaded server."""


def _is_at(server: Server, url: httpx.URL) -> bool:
    address = server.address
    port = url.port if url.port is not None else (443 if url.scheme == "https" else 80)
    same = (url.scheme == "https", url.host, port) == (address.tls, address.host, address.port)
    return same and address.unix_path is None


@final
class ServersTransport(httpx.AsyncBaseTransport):
    """See ``SGLangServers.httpx_transport``. It owns nothing: closing a client that uses it closes no connection."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request to one server and read its answer, whole unless it is a stream of events.

        Blocks while no server can be used, at most the client's pool timeout, and then until the answer is there, or the
        head of the stream, at most its read timeout. Cancelled, the connection is closed; so it is if a stream is not read
        to its end.

        Raises:
          UnsupportedProtocol: the URL is none of these servers'.
          PoolTimeout, ReadTimeout, ConnectError, ReadError, RemoteProtocolError: as the library's own transport would.

        """
        server = await self._server_for(request)
        # Counted like a generation: the next choice sees it, and a look for orphans does not take it for one.
        server.in_flight += 1
        server.sent += 1

        def ended() -> None:
            server.sent -= 1
            server.in_flight -= 1

        prefix = server.address.prefix if request.url.host == ANY else ""
        return await carry(
            request, server.work, prefix=prefix, ended=ended, may_send=partial(self._fleet.until_usable, server)
        )

    async def _server_for(self, request: httpx.Request) -> Server:
        fleet, library, url = self._fleet, library_of(request), request.url
        limit = limits_of(request).get("pool")
        named = [server for server in fleet.servers if _is_at(server, url)]
        if url.host != ANY and not named:
            known = ", ".join(server.url for server in fleet.servers)
            raise library.UnsupportedProtocol(
                f"{url} is none of these servers; allowed: http://{ANY} for any of them, {known}", request=request
            )
        with trio.move_on_after(float("inf") if limit is None else limit):
            if url.host == ANY:
                return await fleet.choose(None)
            await fleet.until_usable(named[0])
            return named[0]
        raise library.PoolTimeout(f"none of the servers could be used within {limit} s", request=request)
