"""The errors that SGLang answers with: four shapes of body, one exception."""

import http
from typing import Any

_CLIENT_ERROR = 400


class Refusal(Exception):
    """A request that is answered with an error. ``body`` is the JSON answer of a call that does not stream."""

    def __init__(self, message: str, *, status: int, body: dict[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.body = body

    @property
    def chunk(self) -> dict[str, Any]:
        """The same as the one chunk of a stream, whose HTTP status is 200."""
        error = {"message": str(self), "type": "invalid_request_error", "code": self.status, "retryable": False}
        return {"error": error}


def invalid(message: str) -> Refusal:
    """A request that is well formed and cannot be served: a bad value, too long, a rid that is active."""
    return Refusal(message, status=_CLIENT_ERROR, body={"error": {"message": message}})


def schema(message: str) -> Refusal:
    """JSON of another form than the contract's: an unknown sampling key, a wrong type."""
    return Refusal(message, status=_CLIENT_ERROR, body={"error": message})


def malformed(message: str) -> Refusal:
    """No JSON at all, or a control call without the body it needs."""
    phrase = http.HTTPStatus.BAD_REQUEST.phrase
    body = {"object": "error", "message": message, "type": phrase, "param": None, "code": _CLIENT_ERROR}
    return Refusal(message, status=_CLIENT_ERROR, body=body)


def unavailable(message: str, status: int) -> Refusal:
    """The scheduler gave the request up: its queue is full."""
    body = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
    return Refusal(message, status=status, body=body)
