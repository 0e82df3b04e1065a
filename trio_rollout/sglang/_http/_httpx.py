"""The pool's connections under an ``httpx`` client: for control calls, and for libraries that want such a client.

One origin per transport. The whole answer is read before it is returned, so nobody can leave it half read in the pool.
"""

from typing import final

import httpx  # noqa: ASYNC127  the client users have

from ._connection import BadResponse, ConnectionBroken, NotConnected
from ._pool import Pool
from ._reader import Response

_HOP_BY_HOP = frozenset({b"transfer-encoding", b"accept-encoding", b"connection", b"content-length"})


def _encode(request: httpx.Request, body: bytes) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    lines += [b"%b: %b" % (name, value) for name, value in request.headers.raw if name.lower() not in _HOP_BY_HOP]
    lines += [b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


@final
class PoolTransport(httpx.AsyncBaseTransport):
    """An ``httpx`` transport over one ``Pool``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and read its whole answer.

        Blocks until the answer is there; cancelled, the connection is closed. A reused connection that ends before the
        first byte of the answer is replaced once.

        Raises:
          httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError: as httpx's own transport would.

        """
        data = _encode(request, await request.aread())
        try:
            response = await self._once(data, fresh=False)
            if response is None:
                response = await self._once(data, fresh=True)
        except NotConnected as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except ConnectionBroken as error:
            raise httpx.ReadError(str(error), request=request) from error
        except BadResponse as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from error
        if response is None:
            raise AssertionError("a new connection is never taken for a stale one")
        return httpx.Response(response.status, headers=response.headers, content=bytes(response.body), request=request)

    async def _once(self, data: bytes, *, fresh: bool) -> Response | None:
        """One try; None if a reused connection had been closed by the server meanwhile."""
        with await self._pool.take(fresh=fresh) as exchange:
            try:
                await exchange.send(data)
                return await exchange.receive()
            except ConnectionBroken as error:
                if exchange.reused and not error.answered:
                    return None
                raise

    async def aclose(self) -> None:
        """Close the pool."""
        self._pool.close()
