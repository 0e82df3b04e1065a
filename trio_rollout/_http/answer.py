"""HTTP/1.1 answers as bytes: heads, whole answers, chunks, server-sent events. No I/O, so that a fake can send a part of one."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
EVENT_STREAM_HEADERS: Final = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("transfer-encoding", "chunked"),
)
"""Of an answer whose body is a stream of events, sent as chunks."""


def answer_head(status: int, headers: Iterable[tuple[str, str]], *, version: str = "1.1") -> bytes:
    """Return the status line, these headers, and the empty line."""
    lines = [f"HTTP/{version} {status} {_PHRASES.get(status, '')}", *[f"{name}: {value}" for name, value in headers]]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def whole_answer(status: int, body: bytes, headers: Iterable[tuple[str, str]], *, head_only: bool = False) -> bytes:
    """Return an answer whose length is announced; ``head_only`` for a HEAD request."""
    head = answer_head(status, [*headers, ("content-length", str(len(body)))])
    return head if head_only else head + body


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body; ``data`` must not be empty, for that would be the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: bytes) -> bytes:
    """Return one server-sent event; ``data`` must be a single line."""
    return b"data: %b\n\n" % data
