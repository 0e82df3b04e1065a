"""Bytes in, one HTTP/1.1 answer out: a state machine without I/O.

Receive into ``buffer()`` and report the number of bytes with ``received(count)``; 0 is the end of the stream. httptools
parses the head. A body of announced length is received straight into a buffer, which grows with what arrives up to one byte more
than announced, so that a body that is too long is noticed without another call. Chunked bodies go through the parser.

Everything that httptools does not bound is bounded here: the heads before an answer, headers, the body, and the framing
between the bytes of a body (docs/decisions/0054-what-a-server-sends-is-bounded.md).

Invariant: ``response`` is set only if the answer is complete by its own framing and nothing follows it.
"""

import enum
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, TypeAlias, final

import attrs
import httptools

from .connection import BadResponse, ConnectionBroken

# Heads of uvicorn and nginx are below 1 kB with some ten headers. All heads of one answer together are bounded.
HEAD_LIMIT: Final = 65536
HEADERS_LIMIT: Final = 256
INTERIM_LIMIT: Final = 32
"""The number of 1xx heads before an answer."""
# The largest answers carry the routed experts of a long context: hundreds of MB. A length above this is taken for damage.
BODY_LIMIT: Final = 1 << 30
SCRATCH_SIZE: Final = 65536
# A chunk of two bytes is sent as seven; chunk extensions and trailers are framing too. Each chunk costs the same.
_FRAMING_PER_BYTE: Final = 4
# A body that goes through the parser is read in pieces of this size: what each costs does not depend on the server.
_PIECE: Final = 16384
_FIRST_BUFFER: Final = 256 * 1024
_MOST_DIGITS: Final = 19

_BLANK_LINE: Final = b"\r\n\r\n"
_NO_BODY: Final = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})


@final
@attrs.define  # frozen costs a call for each field
class Response:
    """A complete answer. ``headers`` are as sent, names in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | memoryview
    reusable: bool
    """True if the connection may carry another exchange."""

    def header(self, name: bytes) -> str | None:
        """Return the value of the first header of this (lower case) name, or None."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)


Head: TypeAlias = tuple[int, list[tuple[bytes, bytes]]]
"""Status and headers."""


def _says(value: bytes, word: bytes, *, alone: bool = False) -> bool:
    """Return True if a header's comma-separated value contains this word, or with ``alone`` is nothing else."""
    words = [item.strip() for item in value.lower().split(b",")]
    return words == [word] if alone else word in words


class _State(enum.Enum):
    HEAD = enum.auto()
    """The head is not complete."""
    EXACT = enum.auto()
    """A body of announced length is being received into its own buffer."""
    PARSED = enum.auto()
    """The body goes through the parser, which knows its end."""
    UNTIL_EOF = enum.auto()
    """The body goes through the parser, and ends with the stream."""
    DONE = enum.auto()
    """The answer is complete."""


@final
class _Head:
    """Collects the headers, with names in lower case: most answers need nothing else of the parser."""

    __slots__ = ("headers",)

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


@final
class _Sink:
    """Collects the body of a message that goes through the parser; its headers are known already."""

    __slots__ = ("begun", "body", "complete", "size")

    def __init__(self) -> None:
        self.body = bytearray()  # a list of chunks would cost 40 bytes for each chunk of one byte
        self.size = 0
        self.complete = False
        self.begun = 0

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        self.body += data

    def take(self) -> bytes:
        """Return the bytes that have come since the last call."""
        data = bytes(self.body)
        self.body.clear()
        return data

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_message_complete(self) -> None:
        self.complete = True


@final
class ResponseReader:
    """Reads one answer. ``scratch`` may be shared by readers whose calls don't overlap: it holds nothing between calls."""

    _body: memoryview
    _got: int
    _headers: list[tuple[bytes, bytes]]
    _keep_alive: bool
    _length: int
    _observed: bytes
    _parser: httptools.HttpResponseParser
    _sink: _Sink
    _status: int
    _wire_size: int

    def __init__(self, scratch: memoryview, body_limit: int = BODY_LIMIT) -> None:
        # Only what every answer needs: the other attributes are set by the state that uses them.
        self._scratch = scratch
        self._state = _State.HEAD
        self._pending = b""
        self._heads_size = self._interim = 0
        self._observer: Callable[[bytes], None] | None = None
        self.body_limit = body_limit
        """The longest body in bytes; a body that is observed has no limit here."""
        self.started = False
        self.response: Response | None = None
        self.observed: Head | None = None
        """Status and headers of an answer whose body goes to the observer, once they are known."""

    def buffer(self) -> memoryview:
        """Return the buffer to receive into next; never empty."""
        if self._state is _State.EXACT:
            return self._body[self._got :]
        return self._scratch if self._state is _State.HEAD else self._scratch[:_PIECE]

    @property
    def parses(self) -> bool:
        """True if each byte that is received has to be parsed; a byte of a body of announced length costs next to nothing."""
        return self._state is not _State.EXACT

    def received(self, count: int) -> None:
        """Take ``count`` bytes that were received into ``buffer()``; 0: the stream has ended.

        Raises:
          ConnectionBroken: the stream ended before the answer did.
          BadResponse: the bytes are not an answer, more than one, or more than is allowed.

        An exception of the observer comes out too; the bytes count as taken.
        """
        if self.response is not None:
            raise AssertionError("an answer was fed after its end")
        if not count:
            self._ended()
            return
        self.started = True
        if self._state is _State.EXACT:
            self._got += count
            self._check_exact()
        elif self._state is _State.HEAD:
            self._feed_head(bytes(self._scratch[:count]))
        else:
            self._feed_body(self._scratch[:count])

    def observe(self, content_type: bytes, observer: Callable[[bytes], None]) -> None:
        """Hand the body of a 200 answer of this content type to ``observer``, if it has no announced length."""
        self._observed, self._observer = content_type, observer

    def forget(self) -> None:
        """Drop what was received of an answer that is given up."""
        self._pending, self._body, self._sink = b"", memoryview(b""), _Sink()

    def _ended(self) -> None:
        if self._state is _State.UNTIL_EOF:
            self._keep_alive = False
            self._finish(memoryview(self._sink.body))
            return
        if not self.started:
            raise ConnectionBroken("the connection was closed before one byte of the answer", answered=False)
        if self._state is _State.HEAD:
            where = f"in the head, after {len(self._pending)} bytes of it"
        elif self._state is _State.EXACT:
            where = f"in the body, after {self._got} of {self._length} bytes"
        else:
            where = f"in a chunked body, after {self._wire_size} bytes"
        raise ConnectionBroken(f"the connection was closed {where}", answered=True)

    def _feed_head(self, data: bytes) -> None:
        pending = self._pending + data if self._pending else data
        while True:
            end = pending.find(_BLANK_LINE)
            if self._heads_size + (end if end >= 0 else len(pending)) > HEAD_LIMIT:
                raise BadResponse(f"the answer's head is longer than {HEAD_LIMIT} bytes")
            if end < 0:
                self._pending = pending
                return
            end += len(_BLANK_LINE)
            self._heads_size += end
            head, pending = pending[:end], pending[end:]
            found = _Head()
            parser = httptools.HttpResponseParser(found)
            _parse(parser, head)
            if len(found.headers) > HEADERS_LIMIT:
                raise BadResponse(f"the answer has {len(found.headers)} headers, allowed: {HEADERS_LIMIT}")
            self._status = parser.get_status_code()
            if self._status >= HTTPStatus.OK:
                break
            self._check_interim()
        self._headers = found.headers
        self._keep_alive = parser.get_http_version() == "1.1"
        self._begin_body(head, pending)

    def _check_interim(self) -> None:
        """Refuse a head before the answer, unless it is 100 Continue or the like and one of a few."""
        if self._status < HTTPStatus.CONTINUE:
            raise BadResponse("the answer is not HTTP/1.1: it begins with an empty line")
        if self._status == HTTPStatus.SWITCHING_PROTOCOLS:
            raise BadResponse("the server answered 101 Switching Protocols, which was not asked for")
        self._interim += 1
        if self._interim > INTERIM_LIMIT:
            raise BadResponse(f"more than {INTERIM_LIMIT} heads with a status of 1xx came before the answer")

    def _begin_body(self, head: bytes, rest: bytes) -> None:
        length, chunked = self._framing()
        if self._status in _NO_BODY:
            length = 0
        if length is None:
            self._begin_parsed(head, chunked=chunked)
            if rest:
                self._feed_body(rest)
        elif length > self.body_limit:
            raise BadResponse(f"the answer announces {length} bytes, allowed: {self.body_limit}")
        elif len(rest) == length:  # the common small answer: head and body in one piece
            self._finish(rest)
        else:
            self._begin_exact(length, rest)

    def _begin_exact(self, length: int, rest: bytes) -> None:
        if len(rest) > length:
            raise BadResponse(f"the answer is longer than the {length} bytes it announced")
        self._state = _State.EXACT
        self._length = length
        self._body = self._buffer_of(_FIRST_BUFFER)
        self._body[: len(rest)] = rest
        self._got = len(rest)

    def _begin_parsed(self, head: bytes, *, chunked: bool) -> None:
        """Parse the body with another parser, which is told the head first."""
        self._state = _State.PARSED if chunked else _State.UNTIL_EOF
        observed = self._observer is not None and self._status == HTTPStatus.OK and self._is_observed()
        self._sink = _Sink()
        self.observed = (self._status, self._headers) if observed else None
        self._parser = httptools.HttpResponseParser(self._sink)
        self._wire_size = 0
        _parse(self._parser, head)

    def _is_observed(self) -> bool:
        return any(name == b"content-type" and value.startswith(self._observed) for name, value in self._headers)

    def _framing(self) -> tuple[int | None, bool]:
        """Return the announced length, and True if the body is chunked; httptools has refused contradictions and duplicates."""
        length: int | None = None
        chunked = False
        for name, value in self._headers:
            if name == b"content-length":
                if len(value) > _MOST_DIGITS:
                    raise BadResponse(f"the answer announces a length of {len(value)} digits, allowed: {_MOST_DIGITS}")
                length = int(value)
            elif name == b"connection":
                self._keep_alive = _says(value, b"keep-alive") or (self._keep_alive and not _says(value, b"close"))
            elif name == b"transfer-encoding":
                if not _says(value, b"chunked", alone=True):
                    raise BadResponse(f"the answer has transfer-encoding {value.decode('latin-1')!r}, not asked for")
                chunked = True
            elif name == b"content-encoding" and not _says(value, b"identity", alone=True):
                raise BadResponse(f"the answer has content-encoding {value.decode('latin-1')!r}, not asked for")
        return length, chunked

    def _check_exact(self) -> None:
        length = self._length
        if self._got > length:
            raise BadResponse(f"the answer is longer than the {length} bytes it announced")
        if self._got == length:
            self._finish(self._body[:length])
        elif self._got == len(
            self._body
        ):  # an announced length is not believed: the buffer grows with what has arrived
            grown = self._buffer_of(2 * self._got)
            grown[: self._got] = self._body
            self._body = grown

    def _buffer_of(self, size: int) -> memoryview:
        """Return a buffer for a part of the body, or for the whole body and one byte more."""
        return memoryview(bytearray(size if size < self._length else self._length + 1))

    def _feed_body(self, data: bytes | memoryview) -> None:
        self._wire_size += len(data)
        sink = self._sink
        _parse(self._parser, data)
        if sink.begun > 1:
            raise BadResponse("the answer is followed by more bytes")
        if self._wire_size > HEAD_LIMIT + _FRAMING_PER_BYTE * sink.size:
            sent = f"{self._wire_size} bytes for {sink.size} bytes of it"
            raise BadResponse(f"the answer's body has too much framing (chunk extensions, trailers): {sent}")
        observed = sink.take() if self.observed is not None else b""
        if len(sink.body) > self.body_limit:
            raise BadResponse(f"the answer's body is longer than {self.body_limit} bytes")
        if sink.complete:
            self._finish(memoryview(sink.body))
        if observed and self._observer is not None:
            self._observer(observed)

    def _finish(self, body: bytes | memoryview) -> None:
        self._state = _State.DONE
        self.response = Response(self._status, self._headers, body, self._keep_alive)


def _parse(parser: httptools.HttpResponseParser, data: bytes | memoryview) -> None:
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise BadResponse(f"the answer is not HTTP/1.1: {error}") from error
