"""The pool's connections under an ``httpx`` client: for control calls, and for libraries that want such a client.

A stream of events is handed on as it arrives. Every other answer is read whole before it is returned, so that no caller can
leave one half read in the pool. Answers and errors belong to the library that the request belongs to: ``httpx``, or ``httpx2``,
into which the clients of OpenAI and Anthropic have moved.
"""

import math
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self, final

import httpx  # noqa: ASYNC127  the client users have
import trio

from .connection import BadResponse, ConnectionBroken, NotConnected
from .exchange import Exchange, Pool

EVENT_STREAM: Final = "text/event-stream"
# The longest answers to control calls, and to chat requests with log-probs, are some MB.
_ANSWER_LIMIT: Final = 64 * 1024 * 1024
_HOP_BY_HOP = frozenset({b"transfer-encoding", b"accept-encoding", b"connection", b"content-length", b"host"})


def library_of(request: httpx.Request) -> Any:
    """Return the library of a request, as a module; its answer and its errors must come from the same one."""
    return sys.modules[type(request).__module__.partition(".")[0]]


def limits_of(request: httpx.Request) -> Mapping[str, float | None]:
    """Return the client's timeouts, by the names that httpx gives them."""
    limits: Mapping[str, float | None] = request.extensions.get("timeout", {})
    return limits


def _encode(request: httpx.Request, host: str, prefix: str, body: bytes) -> bytes:
    path = prefix.encode("ascii") + request.url.raw_path
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("ascii"), path), b"host: %b" % host.encode("ascii")]
    lines += [b"%b: %b" % (name, value) for name, value in request.headers.raw if name.lower() not in _HOP_BY_HOP]
    lines += [b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


def _read_limit(request: httpx.Request) -> float:
    limit = limits_of(request).get("read")
    return math.inf if limit is None else limit


def _too_late(request: httpx.Request) -> Exception:
    error: Exception = library_of(request).ReadTimeout(
        f"no answer from {request.url.host} within {_read_limit(request):g} s", request=request
    )
    return error


@contextmanager
def _as_its_library_says(request: httpx.Request) -> Generator[None]:
    library = library_of(request)
    try:
        yield
    except NotConnected as error:
        raise library.ConnectError(str(error), request=request) from error
    except ConnectionBroken as error:
        raise library.ReadError(str(error), request=request) from error
    except BadResponse as error:
        raise library.RemoteProtocolError(str(error), request=request) from error


async def carry(
    request: httpx.Request,
    pool: Pool,
    *,
    prefix: str = "",
    ended: Callable[[], None] = lambda: None,
    may_send: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
) -> httpx.Response:
    """Send one request over a pool's connections; ``prefix`` goes in front of its path.

    Blocks until the whole answer, or the head of a stream of events, has arrived, at most the client's read timeout.
    Cancelled, the connection is closed. A reused connection that ends before the first byte of the answer is replaced once.
    ``ended`` is called once, when the connection is no longer used. ``may_send`` is awaited when the connection is open: the
    condition that it waits for holds when the request is sent.

    Raises:
      ConnectError, ReadError, RemoteProtocolError, ReadTimeout: of the request's library, as its transport would raise.
    """
    answer: httpx.Response | None = None
    try:
        with _as_its_library_says(request):
            data = _encode(request, pool.address.host_header, prefix, await request.aread())
            with trio.move_on_after(_read_limit(request)):
                answer = await _once(request, await pool.take(), data, ended, may_send)
                if answer is None:
                    answer = await _once(request, await pool.take(fresh=True), data, ended, may_send)
    finally:
        if answer is None or answer.is_closed:  # its stream has not begun
            ended()
    if answer is None:
        raise _too_late(request)
    return answer


async def _once(
    request: httpx.Request,
    exchange: Exchange,
    data: bytes,
    ended: Callable[[], None],
    may_send: Callable[[], Awaitable[None]],
) -> httpx.Response | None:
    """Try once; None if the server had closed a reused connection meanwhile."""
    library, events, streams = library_of(request), deque[bytes](), False
    answer: httpx.Response | None = None
    try:
        exchange.observe(EVENT_STREAM, events.append)
        exchange.limit_body(_ANSWER_LIMIT)
        await may_send()
        await exchange.send(data)
        while (response := exchange.response) is None and exchange.observed is None:
            await exchange.receive_some()
        if exchange.observed is not None:
            status, headers = exchange.observed
            kind = type("EventStream", (EventStream, library.AsyncByteStream), {})  # httpx looks for its own base class
            stream = kind(request, exchange, events, ended)
            answer = library.Response(status, headers=headers, stream=stream, request=request)
            streams = True
        elif response is not None:
            body = bytes(response.body)
            answer = library.Response(response.status, headers=response.headers, content=body, request=request)
    except ConnectionBroken as error:
        if exchange.reused and not error.answered:
            return None
        raise
    finally:
        if not streams:
            exchange.end()
    return answer


class EventStream:
    """The body of a stream of events, as it arrives. Closed before its end, or when reading fails, it closes the connection."""

    def __init__(
        self, request: httpx.Request, exchange: Exchange, events: deque[bytes], ended: Callable[[], None]
    ) -> None:
        self._request = request
        self._exchange = exchange
        self._events = events
        self._ended: Callable[[], None] | None = ended

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece; each has the client's read timeout."""
        while not self._events:
            if self._ended is None or self._exchange.response is not None:
                self._close()
                raise StopAsyncIteration
            try:
                with _as_its_library_says(self._request):
                    await self._read()
            except BaseException:
                self._close()
                raise
        return self._events.popleft()

    async def _read(self) -> None:
        with trio.move_on_after(_read_limit(self._request)):
            await self._exchange.receive_some()
            return
        raise _too_late(self._request)

    def _close(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            self._exchange.end()
            ended()

    async def aclose(self) -> None:
        """Give the connection back if the stream was read to its end; otherwise close the connection."""
        self._close()


@final
class PoolTransport(httpx.AsyncBaseTransport):
    """An ``httpx`` transport over one ``Pool``, which it owns."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and read its whole answer; see ``carry``."""
        return await carry(request, self._pool)

    async def aclose(self) -> None:
        """Close the pool."""
        self._pool.close()
