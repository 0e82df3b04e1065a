"""Makes an exception of a server's refusal: classified once, in the server's words."""

from http import HTTPStatus
from typing import Any, Final

import msgspec

from ...errors import RequestRejected, ServerBusy, ServerError

MALFORMED: Final = (msgspec.DecodeError, RecursionError)
"""The exceptions of decoding JSON: the bytes are not JSON, or nested too deeply."""
_BUSY: Final = frozenset({
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
})
# Enough for a validation error with its list of known fields; a stack trace or an HTML page is cut.
_WORDS_LIMIT: Final = 600
_READ_LIMIT: Final = 65536


def _message_in(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in ("error", "message", "detail"):
            found = _message_in(value.get(key))
            if found:
                return found
    if isinstance(value, list) and value:  # FastAPI's 422: a list of {"loc", "msg"}
        return "; ".join(str(item.get("msg", item)) if isinstance(item, dict) else str(item) for item in value)
    return None


def words_of(body: bytes | memoryview) -> str:
    """Return a body's message for people: the one in SGLang's three error shapes, else the body itself, shortened.

    Of a body that is longer than any error only the beginning is looked at.
    """
    raw = bytes(body[:_READ_LIMIT])
    try:
        words = _message_in(msgspec.json.decode(raw))
    except MALFORMED:
        words = None
    text = words if words is not None else raw.decode("utf-8", "replace").strip()
    size = len(text) if len(body) == len(raw) else len(body)
    return text if size <= _WORDS_LIMIT else f"{text[:_WORDS_LIMIT]}… ({size} characters)"


def _seconds(retry_after: str | None) -> float | None:
    """Return Retry-After in seconds. A date is ignored, because clocks differ."""
    try:
        value = float(retry_after) if retry_after is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < float("inf") else None


def error_of(attempted: str, status: int, words: str, *, retry_after: str | None = None) -> ServerError:
    """Return the exception for an answer with an error status. ``attempted`` begins the message: the method and the URL."""
    message = f"{attempted}: answered {status}: {words or '(nothing)'}"
    if status in _BUSY:
        return ServerBusy(message, status=status, retry_after=_seconds(retry_after))
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return RequestRejected(message, status=status)
    return ServerError(message)
