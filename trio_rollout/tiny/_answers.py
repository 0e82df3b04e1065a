"""The answers to ``/generate``: text, ids and ``meta_info`` in SGLang's form, whole, cumulative or as deltas.

The chunks of one stream: cumulative, or with the server's option as deltas of text, ids and output log-probs.
"""

from typing import Any, final

import attrs

from ._model.tokenizer import TinyTokenizer
from ._registry import ActiveRequest
from ._scheduler.request import Ranked, Request, may_become_stop, trimmed
from ._scheduler.scheduler import Scheduler


@final
@attrs.frozen(kw_only=True, eq=False)
class Answers:
    """Writes answers about what the scheduler holds."""

    scheduler: Scheduler
    tokenizer: TinyTokenizer

    def final(self, live: ActiveRequest, now: float) -> dict[str, Any]:
        """The answer of a request that has ended."""
        request = _request(live)
        return self._answer(live, request, self.text(request, final=True), now=now)

    def partial(self, live: ActiveRequest) -> dict[str, Any] | None:
        """A chunk of a stream, with everything so far; None while its text may turn out to be a stop string."""
        request = _request(live)
        text = self.text(request, final=False)
        if not request.sampling.no_stop_trim and may_become_stop(text, request.sampling.stop):
            return None
        return self._answer(live, request, text, now=None)

    def text(self, request: Request, *, final: bool) -> str:
        """The text so far, without what a client should not see: special tokens, the stop, half a character."""
        ids, sampling, finish = request.output_ids, request.sampling, request.finish
        if finish is None or sampling.no_stop_trim:
            return self._decoded(request, ids, final=final)
        if isinstance(finish.get("matched"), int):
            ids = ids[:-1]
        return trimmed(self._decoded(request, ids, final=final), finish)

    def _decoded(self, request: Request, ids: list[int], *, final: bool) -> str:
        return self.tokenizer.decode(ids, skip_special=request.sampling.skip_special_tokens, final=final)

    def _answer(self, live: ActiveRequest, request: Request, text: str, *, now: float | None) -> dict[str, Any]:
        answer: dict[str, Any] = {"text": text, "output_ids": list(request.output_ids)}
        if request.wanted.prompt_ids:
            answer["prompt_token_ids"] = request.prompt.tolist()
        answer["meta_info"] = self._reduced(request) if request.in_queue else self._whole(request)
        if now is not None:
            answer["meta_info"]["e2e_latency"] = live.ended_at - live.arrived
            answer["meta_info"]["response_sent_to_client_ts"] = now
        return answer

    def _reduced(self, request: Request) -> dict[str, Any]:
        """Of a request that never left the queue, or was put back there."""
        spans = request.spans(request.last_version)
        meta: dict[str, Any] = {"id": request.rid, "finish_reason": request.finish}
        meta |= {"weight_version": spans[-1]["version"], "weight_versions": spans}
        if request.wanted.log_probs:
            self._add_log_probs(request, meta)
        meta["completion_tokens"] = len(request.output_ids)
        return meta

    def _whole(self, request: Request) -> dict[str, Any]:
        spans = request.spans(request.last_version or self.scheduler.version)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": int(request.prompt.size),
            "weight_version": spans[-1]["version"],
            "num_retractions": request.retractions,
        }
        if request.wanted.log_probs:
            self._add_log_probs(request, meta)
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": len(request.output_ids),
            "cached_tokens": request.cached_tokens,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        if request.finish is not None:
            meta["weight_versions"] = spans
        return meta

    def _add_log_probs(self, request: Request, meta: dict[str, Any]) -> None:
        wanted = request.wanted
        scored = request.prompt[wanted.log_probs_from :].tolist() if request.input_log_probs else []
        meta["input_token_logprobs"] = self._triples(request, request.input_log_probs, scored)
        meta["output_token_logprobs"] = self._triples(request, request.log_probs, request.output_ids)
        meta["output_token_logprobs_length"] = len(request.output_ids)
        if wanted.top:
            meta["input_top_logprobs"] = [self._named(request, one) for one in request.input_top]
            meta["output_top_logprobs"] = [self._named(request, one) for one in request.top]
        if wanted.token_ids:
            meta["input_token_ids_logprobs"] = [self._named(request, one) for one in request.input_chosen]
            meta["output_token_ids_logprobs"] = [self._named(request, one) for one in request.chosen]

    def _triples(
        self, request: Request, scores: list[Any], ids: list[int]
    ) -> list[tuple[float | None, int, str | None]]:
        if request.wanted.texts:
            return [
                (score, token, self.tokenizer.decode([token], skip_special=False))
                for score, token in zip(scores, ids, strict=True)
            ]
        return [(score, token, None) for score, token in zip(scores, ids, strict=True)]

    def _named(self, request: Request, ranked: Ranked) -> list[tuple[float, int, str | None]] | None:
        if ranked is None or not request.wanted.texts:
            return ranked  # type: ignore[return-value]  # None is a member of str | None
        return [(score, token, self.tokenizer.decode([token], skip_special=False)) for score, token, _ in ranked]


def _request(live: ActiveRequest) -> Request:
    if live.request is None:
        raise AssertionError(f"{live!r} has nothing to answer with")
    return live.request


_DELTAS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


@final
@attrs.define(eq=False, repr=False)
class Chunks:
    """What one request's client has been sent, and what comes next."""

    _live: ActiveRequest
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
