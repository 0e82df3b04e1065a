"""SGLang's error answers: four shapes of body, one exception."""

import http
from typing import Any

_CLIENT_ERROR = 400


class Refusal(Exception):
    """A request is answered with an error. ``body`` is the JSON answer to a call that does not stream."""

    def __init__(self, message: str, *, status: int, body: dict[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.body = body

    @property
    def chunk(self) -> dict[str, Any]:
        """The error as the single chunk of a stream, whose HTTP status is 200."""
        error = {"message": str(self), "type": "invalid_request_error", "code": self.status, "retryable": False}
        return {"error": error}


def invalid(message: str) -> Refusal:
    """Return the error of a well-formed request that cannot be served: a bad value, too long, a rid that is active."""
    return Refusal(message, status=_CLIENT_ERROR, body={"error": {"message": message}})


def schema(message: str) -> Refusal:
    """Return the error of JSON of the wrong form: an unknown sampling key, a wrong type."""
    return Refusal(message, status=_CLIENT_ERROR, body={"error": message})


def malformed(message: str) -> Refusal:
    """Return the error of a body that is not JSON, or of a control call without the body that it needs."""
    phrase = http.HTTPStatus.BAD_REQUEST.phrase
    body = {"object": "error", "message": message, "type": phrase, "param": None, "code": _CLIENT_ERROR}
    return Refusal(message, status=_CLIENT_ERROR, body=body)


def unavailable(message: str, status: int) -> Refusal:
    """Return the error of a request that the scheduler ended: its queue is full."""
    body = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
    return Refusal(message, status=status, body=body)
