"""Why a request gets no answer: a status, words, and headers that tell real clients whether to try again.

What a protocol of agents is to the gateway: a body to a request, an answer to a body or a stream, an error to a body.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import msgspec

from ..errors import RequestRejected, SessionClosed
from ._values import Answer, ChatRequest

# OpenAI's and Anthropic's clients obey it before all else; without it they try a 503 or 429 again.
NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
RETRY: Mapping[str, str] = {"retry-after": "1", "x-should-retry": "true"}


class Refusal(Exception):  # not a RolloutError: it never leaves the gateway
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] = NO_RETRY) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers


@attrs.frozen
class Limit:
    """A limit that was reached: what, how much, and whether it may be otherwise soon."""

    what: str
    most: int
    passing: bool

    def refusal(self) -> Refusal:
        """As an answer: 429."""
        return Refusal(429, f"{self.what}: the limit is {self.most}", RETRY if self.passing else NO_RETRY)


def refusal_of(error: Exception) -> Refusal:
    """What an agent is told about a turn's failure."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, SessionClosed):
        return Refusal(503, str(error))
    if isinstance(error, RequestRejected):
        return Refusal(400, str(error))
    return Refusal(503, f"the model could not be reached: {error}", RETRY)


class StreamWriter(Protocol):
    """Writes one streamed answer as server-sent events. Each method gives the bytes to send."""

    def begin(self) -> bytes:
        """What comes before the text."""
        ...

    def thoughts(self, delta: str) -> bytes:
        """More of the thoughts, which come before the text."""
        ...

    def text(self, delta: str) -> bytes:
        """More text."""
        ...

    def end(self, answer: Answer, rest: str, thoughts: str) -> bytes:
        """The rest of the text and of the thoughts, and everything that is only known at the end."""
        ...

    def fail(self, refusal: Refusal) -> bytes:
        """The answer ends here with an error."""
        ...


class AgentProtocol(Protocol):
    """One of the APIs that agents speak."""

    def request(self, body: bytes) -> ChatRequest:
        """The request in a body.

        Raises:
          Refusal: it is none.

        """
        ...

    def answer(self, answer: Answer, request: ChatRequest) -> Mapping[str, Any]:
        """The body of a whole answer."""
        ...

    def stream(self, turn: str, request: ChatRequest) -> StreamWriter:
        """A writer for a streamed one."""
        ...

    def error(self, refusal: Refusal) -> Mapping[str, Any]:
        """The body of an error."""
        ...


def decoded(body: bytes, kind: type[Any]) -> Any:
    """The body as this type.

    Raises:
      Refusal: 400, and what is wrong where.

    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is no request: {error}") from error


def key_of(protocol: str, body: bytes) -> str:
    """The same for identical requests."""
    return hashlib.blake2b(protocol.encode() + b"\0" + body, digest_size=16).hexdigest()


def event(data: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def joined(parts: Iterable[str]) -> str:
    """Several pieces of one message's text."""
    return "\n".join(part for part in parts if part)


def function_tool(name: str, description: str, parameters: Any) -> dict[str, Any]:
    """A tool as chat templates and SGLang's parsers take it."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters or {"type": "object"}},
    }


def stops_of(given: str | Sequence[str] | None, name: str) -> tuple[str, ...]:
    """Stop sequences, one or several.

    Raises:
      Refusal: one is empty.

    """
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if "" in stops:
        raise Refusal(400, f"{name}: got an empty one, which would stop everything")
    return stops


def json_schema_of(form: Mapping[str, Any] | None, name: str) -> dict[str, object]:
    """SGLang's own constraint for the format of an answer.

    Raises:
      Refusal: it is neither text nor JSON.

    """
    kind = None if form is None else form.get("type")
    if form is None or kind in {"text", None}:
        return {}
    if kind == "json_schema":
        # Chat Completions wraps it once more.
        inner = form.get("json_schema")
        schema = (inner if isinstance(inner, dict) else form).get("schema")
        return {"json_schema": msgspec.json.encode(schema or {}).decode()}
    if kind == "json_object":
        return {"json_schema": '{"type":"object"}'}
    raise Refusal(400, f"{name}: got type {kind!r}, allowed: text, json_object, json_schema")


def refuse_unless_text(kind: str, known: Sequence[str], where: str) -> None:
    """Refuse a content part that is no text.

    Raises:
      Refusal: it is an image, a file, …

    """
    if kind not in known:
        raise Refusal(400, f"{where}: content of type {kind!r} can't be tokenised, only {', '.join(known)} can")


def at_least_one_message(messages: Sequence[object]) -> None:
    """Refuse an empty conversation.

    Raises:
      Refusal: it is empty.

    """
    if not messages:
        raise Refusal(400, "the conversation has no messages")
