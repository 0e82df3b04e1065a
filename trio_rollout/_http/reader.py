"""Bytes in, one HTTP/1.1 answer out: a state machine without I/O.

Receive into ``buffer()`` and report the number of bytes with ``received(count)``; 0 is the end of the stream. httptools
parses the head. A body of announced length is received straight into a buffer of one byte more than announced, so that a body
that is too long is noticed without another call. Chunked bodies go through the parser.

Invariant: ``response`` is set only if the answer is complete by its own framing and nothing follows it.
"""

import enum
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, TypeAlias, final

import attrs
import httptools

from .connection import BadResponse, ConnectionBroken

# Heads of uvicorn and nginx are below 1 kB; a head beyond this is an attack or a mistake.
HEAD_LIMIT: Final = 65536
# The largest answers carry the routed experts of a long context: tens of MB. A length above this is taken for damage.
BODY_LIMIT: Final = 1 << 30
SCRATCH_SIZE: Final = 65536

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

    __slots__ = ("begun", "chunks", "complete", "on_body")

    def __init__(self, observer: Callable[[bytes], None] | None) -> None:
        self.chunks: list[bytes] = []
        self.on_body = self.chunks.append if observer is None else observer
        self.complete = False
        self.begun = 0

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_message_complete(self) -> None:
        self.complete = True


@final
class ResponseReader:
    """Reads one answer. ``scratch`` may be shared by readers whose calls don't overlap: it holds nothing between calls."""

    _body: memoryview
    _body_size: int
    _got: int
    _headers: list[tuple[bytes, bytes]]
    _keep_alive: bool
    _observed: bytes
    _parser: httptools.HttpResponseParser
    _sink: _Sink
    _status: int

    def __init__(self, scratch: memoryview) -> None:
        # Only what every answer needs: the other attributes are set by the state that uses them.
        self._scratch = scratch
        self._state = _State.HEAD
        self._pending = b""
        self._observer: Callable[[bytes], None] | None = None
        self.started = False
        self.response: Response | None = None
        self.observed: Head | None = None
        """Status and headers of an answer whose body goes to the observer, once they are known."""

    def buffer(self) -> memoryview:
        """Return the buffer to receive into next; never empty."""
        return self._body[self._got :] if self._state is _State.EXACT else self._scratch

    def received(self, count: int) -> None:
        """Take ``count`` bytes that were received into ``buffer()``; 0: the stream has ended.

        Raises:
          ConnectionBroken: the stream ended before the answer did.
          BadResponse: the bytes are not an answer, or more than one.
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

    def _ended(self) -> None:
        if self._state is _State.UNTIL_EOF:
            self._keep_alive = False
            self._finish(b"".join(self._sink.chunks))
            return
        if not self.started:
            raise ConnectionBroken("the connection was closed before one byte of the answer", answered=False)
        if self._state is _State.HEAD:
            where = f"in the head, after {len(self._pending)} bytes of it"
        elif self._state is _State.EXACT:
            where = f"in the body, after {self._got} of {len(self._body) - 1} bytes"
        else:
            where = f"in a chunked body, after {self._body_size} bytes"
        raise ConnectionBroken(f"the connection was closed {where}", answered=True)

    def _feed_head(self, data: bytes) -> None:
        pending = self._pending + data if self._pending else data
        while True:
            end = pending.find(_BLANK_LINE)
            if end < 0:
                if len(pending) > HEAD_LIMIT:
                    raise BadResponse(f"the answer's head is longer than {HEAD_LIMIT} bytes")
                self._pending = pending
                return
            end += len(_BLANK_LINE)
            head, pending = pending[:end], pending[end:]
            found = _Head()
            parser = httptools.HttpResponseParser(found)
            _parse(parser, head)
            self._status = parser.get_status_code()
            if self._status >= HTTPStatus.OK:
                break
            if self._status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise BadResponse("the server answered 101 Switching Protocols, which was not asked for")
            # 100 Continue and the like: the answer is still to come
        self._headers = found.headers
        self._keep_alive = parser.get_http_version() == "1.1"
        self._begin_body(head, pending)

    def _begin_body(self, head: bytes, rest: bytes) -> None:
        length, chunked = self._framing()
        if self._status in _NO_BODY:
            length = 0
        if length is None:
            self._begin_parsed(head, chunked=chunked)
            if rest:
                self._feed_body(rest)
        elif len(rest) == length:  # the common small answer: head and body in one piece
            self._finish(rest)
        else:
            self._begin_exact(length, rest)

    def _begin_exact(self, length: int, rest: bytes) -> None:
        if length > BODY_LIMIT:
            raise BadResponse(f"the answer announces {length} bytes, more than {BODY_LIMIT}")
        if len(rest) > length:
            raise BadResponse(f"the answer is longer than the {length} bytes it announced")
        self._state = _State.EXACT
        self._body = memoryview(bytearray(length + 1))
        self._body[: len(rest)] = rest
        self._got = len(rest)

    def _begin_parsed(self, head: bytes, *, chunked: bool) -> None:
        """Parse the body with another parser, which is told the head first."""
        self._state = _State.PARSED if chunked else _State.UNTIL_EOF
        observed = self._observer is not None and self._status == HTTPStatus.OK and self._is_observed()
        self._sink = _Sink(self._observer if observed else None)
        self.observed = (self._status, self._headers) if observed else None
        self._parser = httptools.HttpResponseParser(self._sink)
        self._body_size = 0
        _parse(self._parser, head)

    def _is_observed(self) -> bool:
        return any(name == b"content-type" and value.startswith(self._observed) for name, value in self._headers)

    def _framing(self) -> tuple[int | None, bool]:
        """Return the announced length, and True if the body is chunked; httptools has refused contradictions and duplicates."""
        length: int | None = None
        chunked = False
        for name, value in self._headers:
            if name == b"content-length":
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
        length = len(self._body) - 1
        if self._got > length:
            raise BadResponse(f"the answer is longer than the {length} bytes it announced")
        if self._got == length:
            self._finish(self._body[:length])

    def _feed_body(self, data: bytes | memoryview) -> None:
        self._body_size += len(data)
        sink = self._sink
        if self._body_size > BODY_LIMIT and sink.on_body is not self._observer:
            raise BadResponse(f"the answer's body is longer than {BODY_LIMIT} bytes")
        _parse(self._parser, data)
        if sink.begun > 1:
            raise BadResponse("the answer is followed by more bytes")
        if sink.complete:
            self._finish(b"".join(sink.chunks))

    def _finish(self, body: bytes | memoryview) -> None:
        self._state = _State.DONE
        self.response = Response(self._status, self._headers, body, self._keep_alive)


def _parse(parser: httptools.HttpResponseParser, data: bytes | memoryview) -> None:
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise BadResponse(f"the answer is not HTTP/1.1: {error}") from error
