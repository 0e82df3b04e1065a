"""Why a request ends after its newest token: a stop string, a stop id, its length. No I/O."""

import re
from collections.abc import Callable

from ._request import FinishReason, Request

_REGEX_TOKENS = 256
"""How far back a stop pattern is looked for; SGLang bounds it by the pattern's longest match."""

_LONGEST_CHARACTER = 4


def stop_reason(request: Request, piece: Callable[[int], bytes]) -> FinishReason | None:
    """The reason to end, if there is one. Strings go before ids, and ids before the length, as in SGLang."""
    sampling, token = request.sampling, request.output_ids[-1]
    if sampling.stop:
        matched = _stop_string(request, piece(token))
        if matched is not None:
            return {"type": "stop", "matched": matched}
    if sampling.stop_regex:
        tail = b"".join(piece(one) for one in request.output_ids[-_REGEX_TOKENS:]).decode("utf-8", "replace")
        for pattern in sampling.stop_regex:
            if re.search(pattern, tail):
                return {"type": "stop", "matched": pattern}
    if token in sampling.stop_ids:
        return {"type": "stop", "matched": token}
    if len(request.output_ids) >= sampling.max_new_tokens:
        return {"type": "length", "length": sampling.max_new_tokens}
    return None


def _stop_string(request: Request, new: bytes) -> str | None:
    """Looked for in the decoded text, as a client sees it: U+FFFD matches bytes that are no UTF-8."""
    stops, data = request.sampling.stop, request.tail + new
    keep = max(len(stop.encode()) for stop in stops) + _LONGEST_CHARACTER
    request.tail = data[-keep:]
    text = data.decode("utf-8", "replace")
    return next((stop for stop in stops if stop in text), None)


def may_become_stop(text: str, stops: tuple[str, ...]) -> bool:
    """Whether ``text`` ends in the beginning of a stop string: a stream then holds it back, for it may be trimmed."""
    return any(text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop) + 1))


def trimmed(text: str, finish: FinishReason) -> str:
    """``text`` up to the stop string that ended it."""
    matched = finish.get("matched")
    place = text.find(matched) if isinstance(matched, str) else -1
    return text if place < 0 else text[:place]
