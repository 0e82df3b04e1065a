"""``/generate``: calls, and their answers in SGLang's form, whole or streamed, of one request or many."""

from functools import partial
from typing import Any, final

import attrs
import msgspec
import trio

from .._http.server import Emit, ServerConnection
from .._http.server_reader import Request as HttpRequest
from ._body import GenerateBody, Refusal, decode_generate, unavailable
from ._call import Call, unfold
from ._frontend import ActiveRequest, Frontend
from ._model.tokenizer import TinyTokenizer
from ._scheduler.request import Ranked, Request, may_become_stop, trimmed
from ._scheduler.scheduler import Scheduler

_DONE = b"[DONE]"


@final
@attrs.frozen(kw_only=True, eq=False)
class Generate:
    """The handler of ``/generate``."""

    frontend: Frontend
    answers: "Answers"

    async def __call__(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Answer one call.

        Raises:
          Refusal: the call is answered with this error.
          ClientGone: the client has left.
        """
        body = decode_generate(request.body)
        if body.stream:
            await connection.events(partial(self._stream, body))
        else:
            await connection.reply_json(200, await self._whole(self._unfolded(body), connection.gone))

    def _unfolded(self, body: GenerateBody) -> Call:
        return unfold(body, self.frontend.submission.new_rid)

    async def _whole(self, call: Call, gone: trio.Event) -> Any:
        async with self.frontend.admitted(call) as all_active:
            for active in all_active:
                finish = (await self.frontend.finished(active, gone)).finish or {}
                if finish.get("status_code"):
                    raise unavailable(str(finish["message"]), int(finish["status_code"]))
            now = trio.current_time()
            answers = [self.answers.final(active, now) for active in all_active]
        return answers if call.many else answers[0]

    async def _stream(self, body: GenerateBody, emit: Emit) -> None:
        try:
            await self._chunks(self._unfolded(body), emit)
        except Refusal as refusal:
            await emit(msgspec.json.encode(refusal.chunk))
        await emit(_DONE)

    async def _chunks(self, call: Call, emit: Emit) -> None:
        incremental = self.frontend.settings.incremental
        async with self.frontend.admitted(call) as all_active:
            chunks = [Chunks(active, self.answers, incremental=incremental) for active in all_active]
            while not all(one.over for one in chunks):
                await all_active[0].changed.wait_until(lambda: any(one.has_news for one in chunks))
                for index, one in enumerate(chunks):
                    chunk = one.next(trio.current_time())
                    if chunk is not None:
                        await emit(msgspec.json.encode(chunk | {"index": index} if call.many else chunk))


@final
@attrs.frozen(kw_only=True, eq=False)
class Answers:
    """Makes the answers to requests: text, ids and ``meta_info`` in SGLang's form."""

    scheduler: Scheduler
    tokenizer: TinyTokenizer

    def final(self, active: ActiveRequest, now: float) -> dict[str, Any]:
        """Return the answer to a request that has ended."""
        request = active.request
        if request is None:
            raise AssertionError(f"{active!r} has no request to answer about")
        answer = self._answer(request, self.text(request, final=True))
        answer["meta_info"] |= {"e2e_latency": active.ended_at - active.arrived, "response_sent_to_client_ts": now}
        return answer

    def partial(self, request: Request) -> dict[str, Any] | None:
        """Return a chunk with everything so far, or None while the end of its text may become a stop string."""
        text = self.text(request, final=False)
        if not request.sampling.no_stop_trim and may_become_stop(text, request.sampling.stop):
            return None
        return self._answer(request, text)

    def text(self, request: Request, *, final: bool) -> str:
        """Return the text so far without what a client should not see: special tokens, the stop, half a character."""
        ids, sampling = request.output_ids, request.sampling
        finish = None if sampling.no_stop_trim else request.finish
        if finish is not None and isinstance(finish.get("matched"), int):
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special=sampling.skip_special_tokens, final=final)
        return text if finish is None else trimmed(text, finish)

    def _answer(self, request: Request, text: str) -> dict[str, Any]:
        answer: dict[str, Any] = {"text": text, "output_ids": list(request.output_ids)}
        if request.wanted.prompt_ids:
            answer["prompt_token_ids"] = request.prompt.tolist()
        return answer | {"meta_info": self._meta(request)}

    def _meta(self, request: Request) -> dict[str, Any]:
        """Return the ``meta_info``: shorter for a request that ended in the queue than for one that ended or runs in the batch."""
        spans = request.spans(request.last_version or self.scheduler.version)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "weight_version": spans[-1]["version"],
            "completion_tokens": len(request.output_ids),
        }
        if request.wanted.log_probs:
            self._add_log_probs(request, meta)
        if request.finish is not None:
            meta["weight_versions"] = spans
        if not request.in_queue:
            meta |= {
                "prompt_tokens": int(request.prompt.size),
                "num_retractions": request.retractions,
                "reasoning_tokens": 0,
                "cached_tokens": request.cached_tokens,
                "cached_tokens_details": None,
                "dp_rank": None,
            }
        return meta

    def _add_log_probs(self, request: Request, meta: dict[str, Any]) -> None:
        wanted = request.wanted
        scored = request.prompt[wanted.log_probs_from :].tolist() if request.input_log_probs else []
        meta["input_token_logprobs"] = self._triples(request, request.input_log_probs, scored)
        meta["output_token_logprobs"] = self._triples(request, request.log_probs, request.output_ids)
        meta["output_token_logprobs_length"] = len(request.output_ids)
        if wanted.top:
            meta["input_top_logprobs"] = self._named(request, request.input_top)
            meta["output_top_logprobs"] = self._named(request, request.top)
        if wanted.token_ids:
            meta["input_token_ids_logprobs"] = self._named(request, request.input_chosen)
            meta["output_token_ids_logprobs"] = self._named(request, request.chosen)

    def _triples(self, request: Request, scores: list[Any], ids: list[int]) -> list[tuple[Any, int, str | None]]:
        texts: list[str | None] = [None] * len(ids)
        if request.wanted.texts:
            texts = [self.tokenizer.decode([token], skip_special=False) for token in ids]
        return list(zip(scores, ids, texts, strict=True))

    def _named(self, request: Request, places: list[Ranked]) -> list[list[tuple[Any, int, str | None]] | None]:
        return [
            None
            if place is None
            else self._triples(request, [score for score, _, _ in place], [token for _, token, _ in place])
            for place in places
        ]


_DELTAS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


@final
@attrs.define(eq=False, repr=False)
class Chunks:
    """The chunks of one streamed answer: cumulative, or with ``incremental`` as deltas of text, ids and log-probs."""

    _active: ActiveRequest
    _answers: Answers
    incremental: bool = attrs.field(kw_only=True)
    over: bool = attrs.field(default=False, init=False)
    """True once the last chunk has been made."""
    _looked: int = attrs.field(default=0, init=False)
    """Tokens that there were when the last chunk was made, or held back."""
    _text: int = attrs.field(default=0, init=False)
    _ids: int = attrs.field(default=0, init=False)

    @property
    def has_news(self) -> bool:
        """True if there are tokens that no chunk was made of, or the request has ended."""
        request = self._active.request
        if request is None or self.over:
            return False
        return self._active.ended.is_set() or len(request.output_ids) > self._looked

    def next(self, now: float) -> dict[str, Any] | None:
        """Return a chunk of everything since the last one, which may be several steps; None if there is nothing to send."""
        request = self._active.request
        if request is None or not self.has_news:
            return None
        self._looked = len(request.output_ids)
        if self._active.ended.is_set():
            self.over = True
            return self._cut(self._answers.final(self._active, now), resend=request.in_queue)
        partial = self._answers.partial(request)
        return None if partial is None else self._cut(partial, resend=False)

    def _cut(self, answer: dict[str, Any], *, resend: bool) -> dict[str, Any]:
        """Return ``answer`` without what has been sent; its counts stay cumulative.

        ``resend``: a request that is aborted in the queue after a retraction. SGLang then sends the last token once more, and
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
