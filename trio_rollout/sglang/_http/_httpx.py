"""The pool's connections under an ``httpx`` client: for control calls, and for libraries that want such a client.

The whole answer is read before it is returned, so nobody can leave it half read in the pool. Answers and errors are of the
library that the request is of: ``httpx``, or ``httpx2``, into which OpenAI's and Anthropic's clients have moved.
"""

import sys
from collections.abc import Mapping
from typing import Any, final

import httpx  # noqa: ASYNC127  the client users have
import trio

from ._connection import BadResponse, ConnectionBroken, NotConnected
from ._pool import Pool
from ._reader import Response

_HOP_BY_HOP = frozenset({b"transfer-encoding", b"accept-encoding", b"connection", b"content-length", b"host"})


def library_of(request: httpx.Request) -> Any:
    """The module that this request is of; its answer and its errors must be of the same."""
    return sys.modules[type(request).__module__.partition(".")[0]]


def limits_of(request: httpx.Request) -> Mapping[str, float | None]:
    """The client's timeouts, by the names that httpx gives them."""
    limits: Mapping[str, float | None] = request.extensions.get("timeout", {})
    return limits


def _encode(request: httpx.Request, host: str, prefix: str, body: bytes) -> bytes:
    path = prefix.encode("ascii") + request.url.raw_path
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("ascii"), path), b"host: %b" % host.encode("ascii")]
    lines += [b"%b: %b" % (name, value) for name, value in request.headers.raw if name.lower() not in _HOP_BY_HOP]
    lines += [b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


async def carry(request: httpx.Request, pool: Pool, *, prefix: str = "") -> httpx.Response:
    """Send one request over a pool's connections and read its whole answer; ``prefix`` goes in front of its path.

    Blocks until the answer is there, at most the client's read timeout; cancelled, the connection is closed. A reused
    connection that ends before the first byte of the answer is replaced once.

    Raises:
      ConnectError, ReadError, RemoteProtocolError, ReadTimeout: of the request's library, as its own transport would.

    """
    library = library_of(request)
    data = _encode(request, pool.address.host_header, prefix, await request.aread())
    limit = limits_of(request).get("read")
    response: Response | None = None
    try:
        with trio.move_on_after(float("inf") if limit is None else limit):
            response = await _once(pool, data, fresh=False) or await _once(pool, data, fresh=True)
    except NotConnected as error:
        raise library.ConnectError(str(error), request=request) from error
    except ConnectionBroken as error:
        raise library.ReadError(str(error), request=request) from error
    except BadResponse as error:
        raise library.RemoteProtocolError(str(error), request=request) from error
    if response is None:
        raise library.ReadTimeout(f"no answer from {pool.address.url} within {limit} s", request=request)
    answer: httpx.Response = library.Response(
        response.status, headers=response.headers, content=bytes(response.body), request=request
    )
    return answer


async def _once(pool: Pool, data: bytes, *, fresh: bool) -> Response | None:
    """One try; None if a reused connection had been closed by the server meanwhile."""
    with await pool.take(fresh=fresh) as exchange:
        try:
            await exchange.send(data)
            return await exchange.receive()
        except ConnectionBroken as error:
            if exchange.reused and not error.answered:
                return None
            raise


@final
class PoolTransport(httpx.AsyncBaseTransport):
    """An ``httpx`` transport over one ``Pool``, which it owns: all its requests go there."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and read its whole answer; see ``carry``."""
        return await carry(request, self._pool)

    async def aclose(self) -> None:
        """Close the pool."""
        self._pool.close()
