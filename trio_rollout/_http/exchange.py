"""One request and its answer on one connection. Cancelled while it waits for the answer, it can be read on."""

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import trio

from .address import Address
from .connection import BadResponse, Connection, ConnectionBroken
from .reader import Head, Response, ResponseReader

if TYPE_CHECKING:
    from types import TracebackType

    from .pool import Pool


def post_head(address: Address, path: str, *, headers: tuple[tuple[str, str], ...] = ()) -> bytes:
    """The head of every POST to ``path``, up to the value of its content-length."""
    # No accept-encoding: nothing compressed is wanted, and an answer that is compressed anyway is refused.
    lines = [
        f"POST {address.prefix}{path} HTTP/1.1",
        f"host: {address.host_header}",
        "content-type: application/json",
        *(f"{name}: {value}" for name, value in headers),
        "content-length: ",
    ]
    return "\r\n".join(lines).encode("latin-1")


def post_request(head: bytes, body: bytes) -> bytes:
    """A whole POST request, to be sent in one piece."""
    return b"%b%d\r\n\r\n%b" % (head, len(body), body)


@final
class Exchange:
    """A connection taken from a pool for one request. As a context manager: leaving gives it back, or closes it.

    The connection goes back only if the answer was read to its end and the server keeps it open; in every other case it is
    closed, so a cancelled or failed exchange can't poison the next one.
    """

    _rest: memoryview

    def __init__(self, pool: "Pool", connection: Connection, scratch: memoryview, *, reused: bool) -> None:
        self._pool = pool
        self._connection = connection
        self._reader = ResponseReader(scratch)
        self._failure: ConnectionBroken | BadResponse | None = None
        self.reused = reused
        """The connection has carried an exchange before: the server may have closed it meanwhile."""
        self.sent = False
        """The whole request has gone out."""
        self._touched = False
        self._closed = False

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        self.end()

    @property
    def response(self) -> Response | None:
        """The answer, once it is complete."""
        return self._reader.response

    @property
    def observed(self) -> Head | None:
        """Status and headers of an answer whose body goes to the observer, once they are known."""
        return self._reader.observed

    def end(self) -> None:
        """Give the connection back, or close it: what leaving the block does, for an exchange that has no block."""
        response = self._reader.response
        self._end(reusable=self.sent and response.reusable if response else not self._touched)

    def close(self) -> None:
        """Close the connection now, whatever was read."""
        self._end(reusable=False)

    def _end(self, *, reusable: bool) -> None:
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._connection, reusable=reusable)

    def observe(self, content_type: str, observer: Callable[[bytes], None]) -> None:
        """Hand the body of a successful answer of this type to ``observer`` as it comes, in place of collecting it.

        Bodies of announced length are collected all the same.
        """
        self._reader.observe(content_type.encode("latin-1"), observer)

    async def send(self, request: bytes) -> None:
        """Send the request. Waits only while the connection takes no more bytes.

        Cancelled, ``sent`` is False: the server has at most a part of the request, and the exchange is useless.

        Raises:
          ConnectionBroken: the connection ended, and the server had not answered before.

        """
        if not self.send_now(request):
            await self.send_rest()

    def send_now(self, request: bytes) -> bool:
        """Send what can be sent without waiting; whether that was all. Raises as ``send`` does."""
        self._touched = True
        done = self._send_now(request)
        self.sent = done >= len(request)
        if not self.sent:
            self._rest = memoryview(request)[done:]
        return self.sent

    async def send_rest(self) -> None:
        """Send what ``send_now`` could not, unless the server answers before. Blocks and raises as ``send`` does."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_an_answer, nursery.cancel_scope)
            while len(self._rest) and self._failure is None:
                await self._connection.wait_writable()
                try:
                    self._rest = self._rest[self._send_now(self._rest) :]
                except ConnectionBroken as error:
                    self._failure = error  # out of the nursery it would come in a group
            nursery.cancel_scope.cancel(reason="sent")
        if self._failure is not None:
            raise self._failure
        self.sent = not len(self._rest)

    async def _watch_for_an_answer(self, sending: trio.CancelScope) -> None:
        """A server that refuses a request for its size may read no more of it."""
        while self._failure is None and self._reader.response is None:
            await self._connection.wait_readable()
            self._receive_now()
        sending.cancel(reason="the server answers before it has read the request")

    async def receive(self) -> Response:
        """Wait for the whole answer.

        An answer that is complete in the connection when a cancellation arrives is returned: a stall of the loop must not
        turn it into a timeout. Otherwise, cancelled, nothing is lost: another call reads on.

        Raises:
          ConnectionBroken: the connection ended before the answer was complete.
          BadResponse: what came is no answer.

        """
        response = self._reader.response
        while response is None:
            if self._failure is not None:
                raise self._failure
            try:
                await self._connection.wait_readable()
            except trio.Cancelled:  # noqa: ASYNC103  if the answer is there, the caller's next checkpoint raises it
                response = self._receive_now()
                if response is None:
                    raise
            else:
                response = self._receive_now()
        return response

    async def receive_some(self) -> None:
        """Wait for the next piece of an answer that is observed, or for its end.

        Cancelled, nothing is lost. Raises as ``receive`` does, at once if the connection had ended before.
        """
        if self._failure is None:
            await self._connection.wait_readable()
            self._receive_now()
        if self._failure is not None:
            raise self._failure

    def _send_now(self, data: bytes | memoryview) -> int:
        try:
            return self._connection.send_now(data)
        except OSError as error:
            # A server may answer (413, 503) and close without having read the request.
            if self._receive_now() is not None:
                return len(data)
            answered = self._reader.started
            raise ConnectionBroken(f"the connection broke while sending: {error}", answered=answered) from error

    def _receive_now(self) -> Response | None:
        """Take everything that is there; the answer if it is complete. A failure is kept for the next ``receive``."""
        reader, connection = self._reader, self._connection
        try:
            while reader.response is None:
                count = connection.recv_into_now(reader.buffer())
                if count is None:
                    return None
                reader.received(count)
        except (ConnectionBroken, BadResponse) as error:
            self._failure = error
        except OSError as error:
            self._failure = ConnectionBroken(f"the connection broke: {error}", answered=reader.started)
            self._failure.__cause__ = error
        return reader.response
