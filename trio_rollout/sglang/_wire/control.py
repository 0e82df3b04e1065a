"""Routes, bodies and answers of the control calls: everything but /generate."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeGuard

import attrs
import msgspec

from ..._core.enums import PauseMode
from ...errors import ServerError
from .errors import MALFORMED

GENERATE: Final = "/generate"
ABORT: Final = "/abort_request"
PAUSE: Final = "/pause_generation"
CONTINUE: Final = "/continue_generation"
FLUSH: Final = "/flush_cache"
READY: Final = "/ready"
LOADS: Final = "/v1/loads?include=core"
MODEL_INFO: Final = ("/model_info", "/get_model_info")
"""In the order to try: the second name is that of older builds."""
SERVER_INFO: Final = ("/server_info", "/get_server_info")
WORKERS: Final = ("/workers", "/list_workers")
"""A router's routes, in the order to try."""


def abort_body(rid: str) -> bytes:
    """Return the body of an abort of one request. Servers match by prefix, so the rid must be whole and of fixed length."""
    return b'{"rid":"%b","abort_all":false}' % rid.encode("ascii")


def abort_all_body() -> dict[str, object]:
    """Return the body of an abort of everything on a server."""
    return {"rid": "", "abort_all": True}


def pause_body(mode: PauseMode) -> dict[str, object]:
    """Return the body of a pause. The mode is always given: a server's default aborts everything."""
    return {"mode": mode.value}


def flushed(status: int, text: str) -> bool:
    """Return True if a flush succeeded: some builds answer 200 with another text."""
    said = text.strip().lower()
    return status == HTTPStatus.OK and (not said or "flushed" in said or "success" in said)


@attrs.frozen(kw_only=True)
class ModelInfo:
    """A server's description of its model."""

    model_path: str | None
    weight_version: str | int | float | None
    generates: bool


def named(value: object) -> str | int | float | None:
    """Return the name of weights in an answer; None if it is neither text nor a number, which is no name."""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _object(attempted: str, body: bytes) -> Mapping[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except MALFORMED as error:
        raise ServerError(f"{attempted}: the answer is not JSON: {bytes(body[:80])!r}") from error
    if not isinstance(value, dict):
        raise ServerError(f"{attempted}: answered {type(value).__name__}, expected an object")
    return value


def decode_model_info(attempted: str, body: bytes) -> ModelInfo:
    """Decode a server's model info.

    Raises:
      ServerError: this is not an SGLang server.
    """
    info = _object(attempted, body)
    if not info.keys() & {"model_path", "weight_version", "is_generation"}:
        raise ServerError(f"{attempted}: this does not speak SGLang: its answer has the fields {sorted(info)[:8]}")
    path = info.get("model_path")
    return ModelInfo(
        model_path=path if isinstance(path, str) else None,
        weight_version=named(info.get("weight_version")),
        generates=info.get("is_generation") is not False,
    )


# SGLang takes prompts up to its context length less 6, or less if its KV pool is smaller than that.
_PROMPT_MARGIN: Final = 6


def decode_context_length(attempted: str, body: bytes) -> int | None:
    """Return how many tokens prompt and output of a request may have together; None if the server does not say."""
    info = _object(attempted, body)
    said = [info.get("context_length")]
    longest = info.get("max_req_input_len")
    if _is_size(longest):
        said.append(longest + _PROMPT_MARGIN)
    return min((length for length in said if _is_size(length)), default=None)


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def decode_load(attempted: str, body: bytes) -> int:
    """Return how many requests a server runs or holds, over all its data-parallel ranks.

    Raises:
      ServerError: the answer has no such number.
    """
    loads = _object(attempted, body).get("loads")
    try:
        return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in loads or ())
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ServerError(f"{attempted}: no running and waiting requests in {loads!r}") from error


def decode_workers(attempted: str, body: bytes) -> Sequence[str]:
    """Return the URLs of a router's workers; a data-parallel rank behind ``@`` is cut off.

    Raises:
      ServerError: this is not a router's answer.
    """
    answer = _object(attempted, body)
    found: list[str] = []
    try:
        for item in [*answer.get("workers", ()), *answer.get("urls", ())]:
            url = item if isinstance(item, str) else item["url"]
            found.append(url.rpartition("@")[0] or url)
    except (TypeError, KeyError, AttributeError) as error:
        raise ServerError(f"{attempted}: no workers' URLs in {answer!r}") from error
    return tuple(dict.fromkeys(found))
