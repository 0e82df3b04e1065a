"""The chunks of one stream: cumulative, or with the server's option as deltas of text, ids and output log-probs."""

from typing import Any, final

import attrs

from ._answers import Answers
from ._registry import Live

_DELTAS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


@final
@attrs.define(eq=False, repr=False)
class Chunks:
    """What one request's client has been sent, and what comes next."""

    _live: Live
    _answers: Answers
    incremental: bool = attrs.field(kw_only=True)
    over: bool = attrs.field(default=False, init=False)
    """Whether the last chunk has been made."""
    _text: int = attrs.field(default=0, init=False)
    _ids: int = attrs.field(default=0, init=False)

    def next(self, now: float) -> dict[str, Any] | None:
        """Everything that is new since the last chunk; several steps may share one. None when there is nothing new."""
        request = self._live.request
        if request is None or self.over:
            return None
        if self._live.ended.is_set():
            self.over = True
            answer = self._answers.final(self._live, now)
            return self._cut(answer, resend=request.in_queue)
        if len(request.output_ids) == self._ids:
            return None
        partial = self._answers.partial(self._live)
        return None if partial is None else self._cut(partial, resend=False)

    def _cut(self, answer: dict[str, Any], *, resend: bool) -> dict[str, Any]:
        """``answer`` without what has been sent; counts in it stay cumulative.

        ``resend``: SGLang's own slip when a request is aborted in its queue, after a retraction: the last token once more,
        text and log-probs whole.
        """
        text, ids, meta = answer["text"], answer["output_ids"], answer["meta_info"]
        seen_text, seen_ids = self._text, self._ids
        self._text, self._ids = len(text), len(ids)
        if not self.incremental:
            return answer
        if resend:
            return answer | {"output_ids": ids[-1:]}
        for name in _DELTAS:
            if name in meta:
                meta[name] = meta[name][seen_ids:]
        return answer | {"text": text[seen_text:], "output_ids": ids[seen_ids:]}
