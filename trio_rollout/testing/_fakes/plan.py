"""The plan of a FakeSGLang: one action for each request, and the faults there are."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

import attrs
import trio


class Fault(enum.Enum):
    """A fault in the answer to one request."""

    IGNORE = "ignore"
    """Answer 200 and do nothing: a lost abort, a pause without effect."""
    HANG = "hang"
    """Read the request and never answer, even if it is aborted."""
    HANG_IN_BODY = "hang_in_body"
    """Send the head and half of the body, then nothing more."""
    RESET = "reset"
    """Reset the connection in place of an answer."""
    CLOSE = "close"
    """Close the connection in place of an answer, as an exiting server does."""
    RESET_IN_BODY = "reset_in_body"
    """Reset the connection half-way through the body."""
    SHORT_BODY = "short_body"
    """Close the connection half-way through the body."""
    SHORT_CHUNKED = "short_chunked"
    """Close the connection in the middle of a chunked body."""
    NO_DONE = "no_done"
    """End a streamed answer without its ``[DONE]``."""
    LONG_BODY = "long_body"
    """Send more bytes than announced."""
    DRIP = "drip"
    """Send the answer one byte at a time, with ``drip_s`` in between."""
    CHUNKED = "chunked"
    """No fault: a chunked body in odd pieces, with a trailer."""
    CLOSE_AFTER = "close_after"
    """No fault: ``Connection: close``, and then it is."""
    HTTP_1_0 = "http_1_0"
    """No fault: an HTTP/1.0 answer whose body ends with the connection."""
    CONTINUE_FIRST = "continue_first"
    """No fault: ``100 Continue``, then the answer."""
    CLOSE_QUIETLY = "close_quietly"
    """No fault: a keep-alive answer, and then the connection is closed all the same."""
    GZIP = "gzip"
    """Compress the body although the client did not ask for it."""
    NOT_HTTP = "not_http"
    """Answer in another protocol."""
    MALFORMED_JSON = "malformed_json"
    """200 with truncated JSON."""
    WRONG_TYPE = "wrong_type"
    """200 with JSON that is not an answer."""
    OTHER_ANSWER = "other_answer"
    """200 with the answer to another request."""
    NO_LOG_PROBS = "no_log_probs"
    """An answer without log-probs."""
    FEWER_LOG_PROBS = "fewer_log_probs"
    """An answer with one log-prob too few."""
    OTHER_TOKEN = "other_token"  # noqa: S105  not that kind of token
    """The log-probs name another token than the output ids."""
    NULL_LOG_PROB = "null_log_prob"
    """One log-prob is null."""
    NO_FINISH_REASON = "no_finish_reason"
    """An answer without its finish reason."""


@attrs.frozen(kw_only=True)
class Reply:
    """A scripted answer, sent at once in place of the proper one."""

    status: int = 200
    body: bytes | Mapping[str, object] | Sequence[object] = b""
    headers: Mapping[str, str] = attrs.field(factory=dict)
    chunked: bool = False
    """Send the body in chunks; by default its length is announced."""


@attrs.frozen(kw_only=True)
class Run:
    """Generate until ``until`` is set (None: for ever), or an abort or a pause arrives; then answer, with ``fault`` if any.

    Aborted, the answer has ``partial`` tokens.
    """

    until: trio.Event | None = None
    partial: int = 2
    fault: Fault | None = None


Action: TypeAlias = Fault | Reply | Run | None
"""The action for one request; None: answer properly, at once."""


@final
@attrs.frozen(kw_only=True, eq=False)
class Seen:
    """A request as the fake server received it."""

    path: str
    number: int
    """The number of requests to this path before this one."""
    rid: str | None
    body: Mapping[str, object]
    headers: Mapping[str, str]
    """By name in lower case."""
    connection: int
    """The number of the connection that carried it, counted from 1."""
    time: float


Plan: TypeAlias = Callable[[Seen], Action] | Sequence[Action] | Mapping[str, Sequence[Action]]
"""A function of the request; or the actions for the first ``/generate`` requests in order; or such sequences by path.
Requests beyond the end of a sequence are answered properly."""


def action_of(plan: Plan, seen: Seen) -> Action:
    """Return the plan's action for this request."""
    if callable(plan):
        return plan(seen)
    actions = plan.get(seen.path, ()) if isinstance(plan, Mapping) else plan if seen.path == "/generate" else ()
    return actions[seen.number] if seen.number < len(actions) else None
