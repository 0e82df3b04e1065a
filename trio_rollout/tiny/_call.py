"""From a ``/generate`` call to the scheduler's requests.

A call is unfolded into items (batches, ``n``). An item becomes a request once it is dispatched: tokenised, its lengths and
values checked, its seed and scripted answer chosen.
"""

import hashlib
from collections.abc import Callable
from typing import Any, final

import attrs
import numpy as np

from ._body import GenerateBody, SamplingBody, checked, decode_ids, invalid
from ._model.tokenizer import TinyTokenizer
from ._scheduler.request import Request, Sampling, Wanted
from ._script import Script
from ._settings import TinySettings

_NOT_CONFIGURED = (
    "The server is not configured to return hidden states. Please set `--return-hidden-states-mode last`, "
    "`--return-hidden-states-mode full`, or the legacy `--enable-return-hidden-states` flag."
)


@attrs.frozen(kw_only=True, eq=False)
class Item:
    """One request of a call: its rid, its prompt as text or ids, and its parameters."""

    rid: str
    text: str | None
    input_ids: list[int] | None
    sampling: SamplingBody
    wanted: Wanted


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """All requests of one HTTP call. ``many``: the answer is an array. ``samples``: the number of samples of each prompt."""

    items: tuple[Item, ...]
    samples: int
    many: bool


def _each(value: Any, count: int, default: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise invalid(f"The length of {name} ({len(value)}) must be equal to the batch size ({count}).")
    return [default if one is None else one for one in value]


def _prompts(body: GenerateBody) -> tuple[list[str | None], list[list[int] | None], bool]:
    """Return texts, ids, and True if the call is a batch; ids take precedence over a text."""
    ids, nested = decode_ids(body.input_ids)
    if ids is not None:
        if not ids or not all(ids):
            raise invalid("input_ids cannot be empty.")
        return [None] * len(ids), list(ids), nested
    if body.text is None:
        raise invalid("Either text, input_ids or input_embeds should be provided.")
    texts = body.text if isinstance(body.text, list) else [body.text]
    if not texts:
        raise invalid("text cannot be empty.")
    return list(texts), [None] * len(texts), isinstance(body.text, list)


def _rids(rid: str | list[str] | None, count: int, *, many: bool, new_rid: Callable[[], str]) -> list[str]:
    if rid is None:
        return [new_rid() for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(count)] if many else [rid]
    if len(rid) != count:
        raise invalid(f"The specified rids length {len(rid)} mismatch with the batch_size {count}.")
    return list(rid)


def _wanted(body: GenerateBody, count: int) -> list[Wanted]:
    chosen: list[Any] = list(body.token_ids_logprob or ())
    columns = zip(
        _each(body.return_logprob, count, 0, "return_logprob"),
        _each(body.logprob_start_len, count, -1, "logprob_start_len"),
        _each(body.top_logprobs_num, count, 0, "top_logprobs_num"),
        _each(chosen, count, [], "token_ids_logprob")
        if any(isinstance(one, list) for one in chosen)
        else [chosen] * count,
        strict=True,
    )
    return [
        Wanted(
            log_probs=bool(log_probs),
            log_probs_from=start if log_probs else -1,
            top=top if log_probs else 0,
            token_ids=tuple(tokens) if log_probs else (),
            texts=bool(body.return_text_in_logprobs),
            prompt_ids=bool(body.return_prompt_token_ids),
            stream=bool(body.stream),
        )
        for log_probs, start, top, tokens in columns
    ]


def unfold(body: GenerateBody, new_rid: Callable[[], str]) -> Call:
    """Return the requests of one call.

    Raises:
      Refusal: there is no prompt, or lists differ in length.
    """
    texts, ids, batch = _prompts(body)
    count = len(texts)
    sampling = _each(body.sampling_params, count, SamplingBody(), "sampling_params")
    samples = {one.n or 1 for one in sampling}
    if len(samples) > 1:
        raise invalid("The parallel_sample_num should be the same for all samples in sample params.")
    if body.return_hidden_states:
        raise invalid(_NOT_CONFIGURED)
    many = batch or samples != {1}
    wanted = _wanted(body, count)
    rids = _rids(body.rid, count, many=many, new_rid=new_rid)
    items = [
        Item(rid=rid, text=text, input_ids=one, sampling=params, wanted=want)
        for rid, text, one, params, want in zip(rids, texts, ids, sampling, wanted, strict=True)
    ]
    return Call(items=tuple(items), samples=samples.pop(), many=many)


@final
@attrs.frozen(kw_only=True, eq=False)
class Submission:
    """Makes requests for one server's scheduler."""

    settings: TinySettings
    tokenizer: TinyTokenizer
    eos_id: int | None
    script: Script | None
    new_rid: Callable[[], str]

    def request(self, item: Item, vocab: int) -> Request:
        """Return the item's request.

        Raises:
          Refusal: the prompt is too long, or a value is out of its range.
        """
        ids = item.input_ids if item.input_ids is not None else self.tokenizer.encode(item.text or "")
        if not ids:
            raise invalid("The input is empty: it has no tokens.")
        room = self._check_length(len(ids), item.sampling.max_new_tokens)
        sampling = checked(item.sampling, vocab=vocab, eos_id=self.eos_id, room=room)
        self._check_wanted(item.wanted, len(ids), vocab)
        return Request(
            rid=item.rid,
            prompt=np.array(ids, np.int64),
            sampling=sampling,
            wanted=item.wanted,
            seed=self._seed(item.rid, sampling),
            forced=self._forced(ids, vocab),
        )

    def multiplied(self, call: Call) -> tuple[list[Item], list[Item]]:
        """For ``n`` > 1: return one item without tokens for each prompt, and ``n`` items of each, all with new rids."""
        once = SamplingBody(max_new_tokens=0)
        warmups = [attrs.evolve(item, rid=self.new_rid(), sampling=once, wanted=Wanted()) for item in call.items]
        samples = [attrs.evolve(item, rid=self.new_rid()) for item in call.items for _ in range(call.samples)]
        return warmups, samples

    def _check_length(self, count: int, limit: int | None) -> int:
        """Return the number of tokens that may follow a prompt of ``count`` tokens."""
        most = self.settings.context_length
        if count >= most:
            raise invalid(f"The input ({count} tokens) is longer than the model's context length ({most} tokens).")
        if limit is not None and count + limit > most:
            raise invalid(
                f"Requested token count exceeds the model's maximum context length of {most} tokens. You requested a total "
                f"of {count + limit} tokens: {count} tokens from the input messages and {limit} tokens for the completion. "
                "Please reduce the number of tokens in the input messages or the completion to fit within the limit."
            )
        return most - count - 1

    def _check_wanted(self, wanted: Wanted, count: int, vocab: int) -> None:
        if wanted.log_probs_from > count:
            raise invalid(
                f"req.logprob_start_len={wanted.log_probs_from} is higher than the number of input tokens "
                f"len(req.origin_input_ids)={count}. Please use a smaller logprob_start_len."
            )
        if any(not 0 <= token < vocab for token in wanted.token_ids):
            raise invalid(f"token_ids_logprob must lie in [0, {vocab - 1}], got {list(wanted.token_ids)}.")

    def _seed(self, rid: str, sampling: Sampling) -> int:
        """Derive the seed from ``sampling_seed``, else from the server's seed and the rid; never from other requests."""
        name = f"{self.settings.seed} {rid}" if sampling.seed is None else f"sampling_seed {sampling.seed}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

    def _forced(self, ids: list[int], vocab: int) -> tuple[int, ...]:
        if self.script is None:
            return ()
        answer = self.script.answer(self.tokenizer.decode(ids, skip_special=False))
        if answer is None:
            return ()
        end = () if self.eos_id is None else (self.eos_id,)
        return tuple(token for token in (*self.tokenizer.encode(answer), *end) if token < vocab)
