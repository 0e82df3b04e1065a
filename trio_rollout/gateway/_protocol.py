"""The gateway's view of an agent's API, and what its three implementations share.

An ``AgentProtocol`` turns a body into a ``ChatRequest``, an ``Answer`` into a body or a stream of events, and a
``Refusal`` into the body of an error. A refusal carries a status, a message, and headers by which real clients decide
to try again or not.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from ..errors import RequestRejected, SessionClosed, SettingsError
from ..tokenizer._tokenizer import require_variables
from ._values import Answer, ChatRequest, Message

# OpenAI's and Anthropic's clients obey this header first; without it they send a request again after a 503 or a 429.
NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
RETRY: Mapping[str, str] = {"retry-after": "1", "x-should-retry": "true"}
_LARGEST: Final = 2**31 - 1


Answered: TypeAlias = Callable[[str], Message | None]
"""Returns the answer of a turn by its id, as a message; None if it is not known."""


def no_answer(_turn: str, /) -> Message | None:
    """Return None, as for a session that has answered nothing."""
    return None


class Refusal(Exception):  # not a RolloutError: it never leaves the gateway
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] = NO_RETRY) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal by which an agent is told about a turn's failure."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, SessionClosed):
        return Refusal(503, str(error))
    if isinstance(error, RequestRejected):
        return Refusal(400, str(error))
    return Refusal(503, f"the model could not be reached: {error}", RETRY)


class StreamWriter(Protocol):
    """Writes one streamed answer as server-sent events. Each method returns the bytes to send."""

    def begin(self) -> bytes:
        """Return the events before the text."""
        ...

    def thoughts(self, delta: str) -> bytes:
        """Return more of the thoughts, which come before the text."""
        ...

    def text(self, delta: str) -> bytes:
        """Return more of the text."""
        ...

    def keep_alive(self) -> bytes:
        """Return an event that says nothing: clients give up a stream on which nothing comes."""
        ...

    def end(self, answer: Answer, rest: str, thoughts: str) -> bytes:
        """Return the rest of the text and of the thoughts, and everything that is only known at the end."""
        ...

    def fail(self, refusal: Refusal) -> bytes:
        """Return the events that end the stream with an error."""
        ...


class AgentProtocol(Protocol):
    """One API that agents speak: Chat Completions, Responses or Messages."""

    def request(self, body: bytes, answered: Answered = no_answer, image: str | None = None) -> ChatRequest:
        """Decode the body of a request; ``answered`` finds what it refers to.

        ``image`` is the chat template's text in the place of an image; None if the policy sees none.

        Raises:
          Refusal: the body is no valid request.
        """
        ...

    def answer(self, answer: Answer, request: ChatRequest) -> Mapping[str, Any]:
        """Return the body of a complete answer."""
        ...

    def stream(self, turn: str, request: ChatRequest) -> StreamWriter:
        """Return a writer for a streamed answer."""
        ...

    def error(self, refusal: Refusal) -> Mapping[str, Any]:
        """Return the body of an error."""
        ...


def decode_body(body: bytes, kind: type[Any]) -> Any:
    """Decode a JSON body as this type, or refuse it with 400 and the name of the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, a number of 5,000 digits
        raise Refusal(400, f"the body is no valid request: {error}") from error


def digest_of(protocol: str, body: bytes) -> str:
    """Return a digest that is the same for identical requests."""
    return hashlib.blake2b(protocol.encode() + b"\0" + body, digest_size=16).hexdigest()


def event(data: object, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def limit_of(asked: int | None) -> int | None:
    """Return a request's limit on new tokens; refuse one below 1. A larger one than any context says the same as that."""
    if asked is None:
        return None
    if asked < 1:
        raise Refusal(400, f"the limit on new tokens: got {max(asked, -_LARGEST)}, allowed: at least 1")
    return min(asked, _LARGEST)


def stops_of(given: str | Sequence[str] | None, name: str) -> tuple[str, ...]:
    """Return the stop sequences of a request that names none, one or several; refuse an empty one."""
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if "" in stops:
        raise Refusal(400, f"{name}: got an empty stop sequence, which would stop every answer at once")
    return stops


def json_schema_of(form: Mapping[str, Any] | None, name: str) -> dict[str, object]:
    """Return SGLang's sampling parameters for the requested format of an answer; refuse all but text and JSON."""
    kind = None if form is None else form.get("type")
    if form is None or kind in {"text", None}:
        return {}
    if kind == "json_schema":
        # Chat Completions wraps the schema once more.
        inner = form.get("json_schema")
        schema = (inner if isinstance(inner, dict) else form).get("schema")
        return {"json_schema": msgspec.json.encode(schema or {}).decode()}
    if kind == "json_object":
        return {"json_schema": '{"type":"object"}'}
    raise Refusal(400, f"{name}: got type {kind!r}, allowed: text, json_object, json_schema")


def signature_of(thoughts: str) -> str:
    """Return a signature of thoughts. Some clients send only signed thoughts back, and rewrite the others."""
    return base64.b64encode(hashlib.blake2b(thoughts.encode()).digest()).decode()


def checked_variables(variables: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return the chat template's variables that a request sets; refuse those that the caller of a template sets."""
    try:
        require_variables(variables, name)
    except SettingsError as error:
        raise Refusal(400, str(error)) from error
    return variables


def thinking_of(effort: str | None) -> dict[str, object]:
    """Return the chat template's variables for the requested effort of thinking; "none" switches thinking off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False, "thinking": False} if effort == "none" else {})}


def at_least_one_message(messages: Sequence[object]) -> None:
    """Refuse an empty conversation."""
    if not messages:
        raise Refusal(400, "the conversation has no messages")
