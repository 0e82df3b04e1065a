"""The connections to one server, and one request with its answer on one of them, which can be read on when it was cancelled.

The exchange that reads on (docs/decisions/0012-what-leaving-a-request-costs.md)

A rollout that is cancelled in the middle of a request must not simply close its socket. SGLang notices a closed socket only
after 3 to 4 seconds, and samples on until then; and the tokens it has sampled are lost, although they may be trained on. So
the client sends an abort *on another connection*, and reads on here: SGLang answers the aborted request with what it has.

This works only if a cancellation leaves the exchange where it was. Three things see to that:

- The only checkpoints are ``wait_readable`` and ``wait_writable``. A cancellation arrives there, before a byte is taken, and
  never between taking bytes from the connection and giving them to the reader. ``receive`` may be called again at any time.
- The reader is a state machine that owns what was received (``reader``). No frame of a coroutine that was cancelled holds a
  part of the answer.
- Leaving the block is what gives up the connection, not the cancellation. The cleanup runs inside the block, shielded and
  bounded (``sglang._cancellation``): it aborts, reads on, and leaves. The connection then goes back to the pool if the answer
  was complete, and is closed if not, so that the rest of an answer never meets the next request.

A server may send faster than its bytes can be read. What is read between two checkpoints is therefore bounded (``_SHARE``), so
that a server that floods one connection takes no more than its turn from the other tasks, from deadlines and from Ctrl-C.

Two races have rules. If the answer is already complete in the socket when the cancellation arrives, ``receive`` returns it:
a deadline that passed during a stall of the loop must not throw away an answer that came in time. If the cancellation
arrives during ``send``, there is nothing to read on: the server has at most a part of the request, and the connection closes.
"""

import errno
from collections import deque
from collections.abc import Callable
from typing import Final, Self, final

import trio

from .._util.time import wait_s
from .connection import Address, BadResponse, Connection, ConnectionBroken, Connector, NotConnected
from .reader import BODY_LIMIT, SCRATCH_SIZE, Head, Response, ResponseReader

# Bytes that are parsed between two checkpoints: half a millisecond of chunks of one byte. Of a body of announced length, which
# is only copied, 16 times as much. A cancelled call takes four shares at once, for an answer that is complete.
_SHARE: Final = 16384
_LAST_SHARE: Final = 4 * _SHARE
_COPIED: Final = 16


def post_head(address: Address, path: str, *, headers: tuple[tuple[str, str], ...] = ()) -> bytes:
    """Return the head of every POST to ``path``, up to the value of its content-length."""
    # No accept-encoding: a compressed answer is not wanted, and is refused if it comes anyway.
    lines = [
        f"POST {address.prefix}{path} HTTP/1.1",
        f"host: {address.host_header}",
        "content-type: application/json",
        *(f"{name}: {value}" for name, value in headers),
        "content-length: ",
    ]
    return "\r\n".join(lines).encode("latin-1")


def post_request(head: bytes, body: bytes) -> bytes:
    """Return a whole POST request, to be sent in one piece."""
    return b"%b%d\r\n\r\n%b" % (head, len(body), body)


@final
class Exchange:
    """A connection taken from a pool for one request, as a context manager.

    Leaving the block gives the connection back if the answer was read to its end and the server keeps the connection open;
    in every other case the connection is closed, so that a cancelled or failed exchange cannot poison the next one.
    """

    _rest: memoryview

    def __init__(self, pool: "Pool", connection: Connection, scratch: memoryview, *, reused: bool) -> None:
        self._pool = pool
        self._connection = connection
        self._reader = ResponseReader(scratch, pool.answer_limit)
        self._failure: ConnectionBroken | BadResponse | None = None
        self._observer_error: Exception | None = None
        self.reused = reused
        """True if the connection has carried an exchange before: the server may have closed it meanwhile."""
        self.sent = False
        """True once the whole request has gone out."""
        self._touched = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def response(self) -> Response | None:
        """The answer, once it is complete."""
        return self._reader.response

    @property
    def observed(self) -> Head | None:
        """Status and headers of an answer whose body goes to the observer, once they are known."""
        return self._reader.observed

    def limit_body(self, most: int) -> None:
        """Refuse a body of more than so many bytes, or than the pool allows, unless it is observed."""
        self._reader.body_limit = min(most, self._pool.answer_limit)

    def end(self) -> None:
        """Give the connection back or close it, as leaving the block does; for an exchange that is not used as a block."""
        response = self._reader.response
        self._end(reusable=self.sent and response.reusable if response else not self._touched)

    def close(self) -> None:
        """Close the connection now, even if the answer was read."""
        self._end(reusable=False)

    def _end(self, *, reusable: bool) -> None:
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._connection, reusable=reusable)
            if self._reader.response is None:  # the exception that ended it keeps this exchange alive for a while
                self._reader.forget()

    def observe(self, content_type: str, observer: Callable[[bytes], None]) -> None:
        """Hand the body of a 200 answer of this content type to ``observer`` as it arrives, in place of collecting it.

        A body of announced length is collected all the same. An exception of the observer comes out of the call that
        receives; a BadResponse ends the answer. After any other, the answer can be read on.
        """
        self._reader.observe(content_type.encode("latin-1"), observer)

    async def send(self, request: bytes) -> None:
        """Send the request.

        Blocks only while the connection takes no more bytes. Cancelled, ``sent`` is False: the server has at most a part of
        the request, and the exchange cannot be read on.

        Raises:
          ConnectionBroken: the connection ended, and the server had not answered before.
        """
        if not self.send_now(request):
            await self.send_rest()

    def send_now(self, request: bytes) -> bool:
        """Send what can be sent without waiting, and return True if that was all. Raises as ``send`` does."""
        self._touched = True
        done = self._send_now(request)
        self.sent = done >= len(request)
        if not self.sent:
            self._rest = memoryview(request)[done:]
        return self.sent

    async def send_rest(self) -> None:
        """Send what ``send_now`` could not send, unless the server answers before. Blocks and raises as ``send`` does."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_an_answer, nursery.cancel_scope)
            while len(self._rest) and self._failure is None:
                await self._connection.wait_writable()
                try:
                    self._rest = self._rest[self._send_now(self._rest) :]
                except ConnectionBroken as error:
                    self._failure = error  # raised here, it would leave the nursery in a group
            nursery.cancel_scope.cancel(reason="sent")
        if self._failure is not None:
            raise self._failure
        self.sent = not len(self._rest)
        if self._observer_error is not None:
            raise self._observer_error

    async def _watch_for_an_answer(self, sending: trio.CancelScope) -> None:
        """Stop sending when the server answers: one that refuses a request for its size reads no more of it."""
        while self._failure is None and self._reader.response is None:
            await self._connection.wait_readable()
            try:
                self._receive_now()
            except Exception as error:  # noqa: BLE001  raised by send_rest: here, it would leave the nursery in a group
                self._observer_error = error
                break
        sending.cancel(reason="the server answers before it has read the request")

    async def receive(self) -> Response:
        """Wait for the whole answer.

        Cancelled while the answer is already complete in the connection, it is returned all the same. Otherwise, cancelled,
        nothing is lost: another call reads on.

        Raises:
          ConnectionBroken: the connection ended before the answer was complete.
          BadResponse: the server sent something that is not an answer.
        """
        response = self._reader.response
        while response is None or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            try:
                await self._connection.wait_readable()
            except trio.Cancelled:  # noqa: ASYNC103  with a complete answer, the caller's next checkpoint raises it
                response = self._receive_now(_LAST_SHARE)
                if response is None:
                    raise
            else:
                response = self._receive_now()
        return response

    async def receive_some(self) -> None:
        """Wait for the next piece of an observed answer, or for its end.

        Cancelled, nothing is lost. Raises as ``receive`` does; at once, if the connection has already failed.
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

    def _receive_now(self, most: int = _SHARE) -> Response | None:
        """Receive what has arrived, up to a share, and return the answer if it is complete. The next ``receive`` raises a failure."""
        reader, connection = self._reader, self._connection
        try:
            while reader.response is None and most > 0:
                try:
                    count = connection.recv_into_now(reader.buffer())
                except OSError as error:  # not one of the observer, which ``received`` calls
                    raise ConnectionBroken(f"the connection broke: {error}", answered=reader.started) from error
                if count is None:
                    return None
                reader.received(count)
                most -= count if reader.parses else count // _COPIED
        except (ConnectionBroken, BadResponse) as error:
            self._failure = error
        return reader.response


_UNWATCHED_S: Final = 1.0
# Errors of connect() that are this machine's.
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


@final
class Pool:
    """The connections to one server. ``connections`` counts the open ones, idle or in use.

    Idle connections are reused in O(1), the one used last first, so that the surplus of a burst ages at the other end, where
    ``tend`` closes it. There is no limit on the connections in use and no queue: the engine's slots bound them.
    """

    def __init__(
        self,
        address: Address,
        connect: Connector,
        *,
        max_idle: int,
        idle_s: float,
        connect_s: float,
        answer_limit: int = BODY_LIMIT,
    ) -> None:
        self.address = address
        self.answer_limit = answer_limit
        """The longest answer in bytes, but for a stream of events."""
        self.connections = 0
        self._connect = connect
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._connect_s = connect_s
        self._idle: deque[tuple[Connection, float]] = deque()
        self._scratch = memoryview(bytearray(SCRATCH_SIZE))
        self._closed = False
        self._asleep: trio.Event | None = None
        self._watched: Connection | None = None
        self._watch = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<Pool {self.address.url}: {self.connections} open, {len(self._idle)} idle>"

    async def take(self, *, fresh: bool = False) -> Exchange:
        """Return a connection for one exchange: an idle one if any is alive, else (or with ``fresh``) a new one.

        Blocks only for a new connection, at most ``connect_s``. Cancelled, nothing stays open.

        Raises:
          NotConnected: no connection could be opened.
        """
        idle = None if fresh else self.take_idle()
        return idle if idle is not None else await self.open()

    def take_idle(self) -> Exchange | None:
        """Return an idle connection for one exchange, or None if none is alive."""
        if not self._idle:
            return None
        oldest = trio.current_time() - self._idle_s
        while self._idle:
            connection, since = self._idle.pop()
            if connection is self._watched:
                self._watch.cancel(reason="it is used again")
            # The server is about to close one that is too old; a new one avoids that race.
            if since >= oldest and self._alive(connection):
                return Exchange(self, connection, self._scratch, reused=True)
            self._drop(connection)
        return None

    async def open(self) -> Exchange:
        """Return a new connection for one exchange; blocks and raises as ``take`` does."""
        if self._closed:
            raise RuntimeError(f"the connections to {self.address.url} are closed: open_sglang_servers has been left")
        url = self.address.url
        try:
            with trio.move_on_after(self._connect_s):
                connection = await self._connect(self.address)
                self.connections += 1
                return Exchange(self, connection, self._scratch, reused=False)
        except OSError as error:
            raise NotConnected(f"cannot connect to {url}: {error}", ours=error.errno in _OURS) from error
        raise NotConnected(f"cannot connect to {url}: no answer within {self._connect_s:g} s")

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        """Take back a connection from an exchange that has ended; close it unless ``reusable``."""
        if not reusable or self._closed:
            self._drop(connection)
            return
        now = trio.current_time()
        self._idle.append((connection, now))
        while self._idle and (len(self._idle) > self._max_idle or self._idle[0][1] + self._idle_s < now):
            self._drop(self._idle.popleft()[0])
        if self._asleep is not None:
            self._asleep.set()
            self._asleep = None

    async def tend(self) -> None:
        """Close each idle connection when it is due, or when its server closes it. Runs until cancelled.

        The one that is idle for the longest is due first, and the first that a server closes. Only that one is watched, and
        only once it has been idle for a second: a busy pool has none, and costs nothing here.
        """
        while True:
            if not self._idle:
                self._asleep = trio.Event()
                await self._asleep.wait()
                await wait_s(
                    min(_UNWATCHED_S, self._idle_s)
                )  # a busy pool wakes this task once a second, not each time
                continue
            longest = connection, since = self._idle[0]
            due = since + self._idle_s
            if trio.current_time() < (begin := min(due, since + _UNWATCHED_S)):
                await wait_s(begin - trio.current_time())
                continue
            await self._watch_until(connection, due)
            if self._idle and self._idle[0] is longest:
                self._idle.popleft()
                self._drop(connection)

    async def _watch_until(self, connection: Connection, due: float) -> None:
        """Wait until an idle connection is due, its server has closed it, or it is used again."""
        with trio.CancelScope(deadline=due) as self._watch:
            self._watched = connection
            try:
                await connection.wait_readable()
            finally:
                self._watched = None

    def close(self) -> None:
        """Close the idle connections now, and the others when they are given back."""
        self._closed = True
        while self._idle:
            self._drop(self._idle.pop()[0])

    def _drop(self, connection: Connection) -> None:
        if connection is self._watched:  # a socket must not be closed while a task waits for it
            self._watch.cancel(reason="it is closed")
        self.connections -= 1
        connection.close()

    def _alive(self, connection: Connection) -> bool:
        """Return True if an idle connection has nothing to read: data, or its end, makes it useless."""
        try:
            return connection.recv_into_now(self._scratch) is None
        except OSError:
            return False
