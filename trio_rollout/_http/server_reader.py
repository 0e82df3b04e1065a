"""Bytes in, HTTP/1.1 requests out: the server's reader, a state machine without I/O.

Feed it what was received, in pieces of any size, and take the requests from it in the order in which they came::

    reader.feed(data)  # b"": the stream has ended
    while (request := reader.next()) is not None:
        ...

httptools parses. The reader collects, and bounds what httptools does not: the bytes and the headers of a head, the bytes of a body, and of the
framing between two bytes of a body.

Invariants: the requests depend on the bytes and not on how they were cut into pieces; a request is returned only if it was
complete by its own framing; nothing is returned after damage, after ``connection: close`` or after a CONNECT.
"""

from collections import deque
from http import HTTPStatus
from typing import Any, Final, NoReturn, final
from urllib.parse import parse_qsl, urlsplit

import attrs
import httptools

# More than any client sends; httptools itself has no limit.
REQUEST_HEAD_LIMIT: Final = 65536
REQUEST_HEADERS_LIMIT: Final = 256
# The longest prompts of a long context with images are some tens of MB.
REQUEST_BODY_LIMIT: Final = 64 * 1024 * 1024

_BLANK_LINE: Final = b"\r\n\r\n"
_ANY_LENGTH: Final = 1 << 63
_MOST_DIGITS: Final = 20


class BadRequest(ValueError):
    """The client sent something that is not an HTTP/1.1 request, or is longer than allowed."""

    def __init__(self, message: str, *, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status
        """The status to answer with."""


@final
@attrs.define(eq=False)  # frozen costs a call for each field
class Request:
    """One request."""

    method: str
    target: bytes
    """The request target as sent: ``/path?query``, a URL, or ``host:port`` of a CONNECT."""
    headers: list[tuple[bytes, bytes]]
    """As sent, in order. Trailers of a chunked body are not among them."""
    keep_alive: bool
    """The connection may carry another request after this one."""
    body: bytes = b""

    @property
    def path(self) -> str:
        """The path of the target, without its query; not unquoted."""
        target = self.target.decode("latin-1")
        if target.startswith("/"):
            return target.partition("?")[0]
        try:
            return urlsplit(target).path
        except ValueError:  # a host in brackets that is none
            return target

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the target's query; the last value of each."""
        return dict(parse_qsl(self.target.partition(b"?")[2].decode("latin-1")))

    def header(self, name: bytes) -> str | None:
        """Return the value of the first header of this (lower case) name, or None."""
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == name), None)


@final
class _Parts:
    """The request that is being parsed. httptools calls the ``on_...`` methods; what is complete lands in ``done``."""

    def __init__(self, head_limit: int, body_limit: int) -> None:
        self.parser: Any = httptools.HttpRequestParser(self)
        self.done: deque[Request] = deque()
        self.request: Request | None = None
        """The request whose head is complete and whose body is not."""
        self.in_head = False
        self.expects_continue = False
        self.ended = False
        """The last request in ``done`` is the last one on this connection."""
        self.refusal: BadRequest | None = None
        self.quiet = 0
        """Bytes fed since a message ended, its head was complete, or a byte of its body came."""
        self._head_limit = head_limit
        self._body_limit = body_limit

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: bytes | bytearray = b""
        self.in_head, self.expects_continue = True, False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # a trailer
        self._headers.append((name, value))
        if len(self._headers) > REQUEST_HEADERS_LIMIT:
            self.refuse(f"more than {REQUEST_HEADERS_LIMIT} headers", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        lower = name.lower()
        # httptools refuses numbers beyond 64 bits, and not zeros in front of others.
        if lower == b"content-length" and (length := int(value[-_MOST_DIGITS:])) > self._body_limit:
            self.refuse(f"a body of {length} bytes, at most {self._body_limit}", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif lower == b"expect" and value.lower() == b"100-continue":
            self.expects_continue = True

    def on_headers_complete(self) -> None:
        if self.quiet > self._head_limit:  # a body that came with the head may be among these bytes
            size = len(self._target) + sum(len(name) + len(value) for name, value in self._headers)
            self.check_head(size)
        method = self.parser.get_method().decode("ascii")
        keep_alive = self.parser.should_keep_alive() and method != "CONNECT"
        self.request = Request(method, self._target, self._headers, keep_alive)
        if self.parser.should_upgrade() and method != "CONNECT":
            self._check_offer(self.request)
        self.in_head, self.quiet = False, 0

    def on_body(self, data: bytes) -> None:
        # Most bodies come in one piece, which is not copied. A list of pieces would cost 60 bytes for each chunk of one byte.
        if not self._body:
            self._body = data
        elif isinstance(self._body, bytearray):
            self._body += data
        else:
            self._body = bytearray(self._body) + data
        self.quiet, self.expects_continue = 0, False
        if len(self._body) > self._body_limit:
            self.refuse(f"a body of more than {self._body_limit} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    def on_message_complete(self) -> None:
        if self.request is None:
            raise AssertionError("a request ended before its head did")
        self.request.body = bytes(self._body)
        self.done.append(self.request)
        self.ended = not self.request.keep_alive
        self.request, self.quiet, self.expects_continue = None, 0, False

    def _check_offer(self, request: Request) -> None:
        """Refuse a body behind the offer of another protocol: httptools leaves it unread, as bytes of that protocol.

        Found by fuzzing: the body was read as the next request.
        """
        if request.header(b"transfer-encoding") is not None or request.header(b"content-length") not in {None, "0"}:
            self.refuse("a body in a request that offers another protocol", HTTPStatus.BAD_REQUEST)

    def check_head(self, size: int) -> None:
        """Refuse a head, or the framing between two bytes of a body, if this is too many bytes for it."""
        if size > self._head_limit:
            self.refuse(f"a head of more than {self._head_limit} bytes", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def refuse(self, message: str, status: HTTPStatus) -> NoReturn:
        """Raise BadRequest. httptools replaces it by another error, so that it is kept too."""
        self.refusal = BadRequest(message, status=status)
        raise self.refusal


@final
class RequestReader:
    """Reads the requests of one connection.

    A head, and a body, is refused beyond its limit. Up to one piece more may be held when that is noticed.
    """

    def __init__(self, *, head_limit: int = REQUEST_HEAD_LIMIT, body_limit: int = REQUEST_BODY_LIMIT) -> None:
        self._parts = _Parts(head_limit, body_limit)
        self._damage: BadRequest | None = None
        self.over: bool = False
        """No further request is read: the stream has ended, or what follows is not for this reader."""

    @property
    def waiting(self) -> int:
        """The number of complete requests that ``next`` has not returned yet."""
        return len(self._parts.done)

    @property
    def has_next(self) -> bool:
        """True if ``next`` would return a request or raise."""
        return bool(self._parts.done) or self._damage is not None

    @property
    def in_head(self) -> bool:
        """True if a head has begun and is not complete."""
        return self._parts.in_head and not self.over

    @property
    def expects_continue(self) -> bool:
        """True if the client waits for ``100 Continue`` before it sends the body of its request."""
        return self._parts.expects_continue and not self.over

    def next(self) -> Request | None:
        """Return the next request, in the order of arrival, or None if none is complete.

        Raises:
          BadRequest: all complete requests have been returned, and what follows them is damaged.
        """
        if self._parts.done:
            return self._parts.done.popleft()
        if self._damage is not None:
            raise self._damage
        return None

    def continued(self) -> None:
        """Note that ``100 Continue`` was sent."""
        self._parts.expects_continue = False

    def feed(self, data: bytes) -> None:
        """Take received bytes; empty at the end of the stream. Never raises: damage is raised by ``next``."""
        if not data:
            self._end()
        while data and not self.over:
            data = self._parse(data)

    def refuse(self, error: BadRequest) -> None:
        """Read no further; let ``next`` raise ``error``, once all complete requests have been returned."""
        if not self.over:
            self._damage = error
            self._end()

    def _parse(self, data: bytes) -> bytes:
        """Parse a piece. Return the rest of it if the parser stopped where a client offers another protocol."""
        parts, rest = self._parts, b""
        parts.quiet += len(data)
        try:
            parts.parser.feed_data(data)
            if parts.quiet:
                parts.check_head(parts.quiet)
        except httptools.HttpParserUpgrade as upgrade:
            # No other protocol is spoken here: the client goes on with HTTP/1.1, unless this was a CONNECT.
            rest = data[upgrade.args[0] :]
        except (httptools.HttpParserError, BadRequest) as error:
            if not parts.ended:  # after ``connection: close`` httptools takes any byte for an error
                self.refuse(parts.refusal or BadRequest(str(error)))
        if parts.ended:
            self._end()
        return rest

    def _end(self) -> None:
        self.over = True
        self._parts.parser = None  # each holds the other


def split_head(data: bytes, *, limit: int = REQUEST_HEAD_LIMIT) -> tuple[Request, bytes] | None:
    """Parse a request's head and return it, without a body, with the bytes behind it; None if it is not complete.

    For a proxy, which hands on what follows the head as it is.

    Raises:
      BadRequest: ``data`` does not begin with the head of a request, or it is longer than ``limit``.
    """
    head, blank, rest = data.partition(_BLANK_LINE)
    if len(head) > limit:
        raise BadRequest(f"a head of more than {limit} bytes", status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    if not blank:
        return None
    parts = _Parts(limit, _ANY_LENGTH)
    try:
        parts.parser.feed_data(head + blank)
    except httptools.HttpParserUpgrade:
        pass  # a CONNECT, or the offer of another protocol
    except httptools.HttpParserError as error:
        raise (parts.refusal or BadRequest(str(error))) from error
    finally:
        parts.parser = None
    request = parts.done[0] if parts.done else parts.request
    if request is None:
        raise BadRequest("an empty line before the request")
    return request, rest
