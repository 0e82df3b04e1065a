"""One ``/generate`` call: the requests it stands for. Batches and ``n`` are unfolded here."""

from collections.abc import Callable
from typing import Any

import attrs

from ._body import GenerateBody, SamplingBody, decode_ids
from ._refusal import invalid
from ._request import Wanted

_NOT_CONFIGURED = (
    "The server is not configured to return hidden states. Please set `--return-hidden-states-mode last`, "
    "`--return-hidden-states-mode full`, or the legacy `--enable-return-hidden-states` flag."
)


@attrs.frozen(kw_only=True, eq=False)
class Item:
    """One request of a call: its rid, its prompt as text or ids, and what is asked of it."""

    rid: str
    text: str | None
    input_ids: list[int] | None
    sampling: SamplingBody
    wanted: Wanted


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """All requests of one HTTP call. ``many``: the answer is an array. ``samples``: each prompt is sampled so often."""

    items: tuple[Item, ...]
    samples: int
    many: bool
    stream: bool


def _each(value: Any, count: int, default: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise invalid(f"The length of {name} ({len(value)}) must be equal to the batch size ({count}).")
    return [default if one is None else one for one in value]


def _prompts(body: GenerateBody) -> tuple[list[str | None], list[list[int] | None], bool]:
    """Texts, ids, and whether the call is a batch; ids win over a text."""
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
    """The requests of one call.

    Raises:
      Refusal: no prompt, or lists of different lengths.

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
    return Call(items=tuple(items), samples=samples.pop(), many=many, stream=bool(body.stream))
