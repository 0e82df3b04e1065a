"""One ``/generate`` call: the requests it stands for. Batches and ``n`` are unfolded here, sampling values are checked."""

import math
from collections.abc import Callable
from typing import Any

import attrs

from ._body import GenerateBody, SamplingBody, decode_ids
from ._refusal import invalid
from ._request import Penalties, Sampling, Wanted
from ._sampler import EVERY_TOKEN, Limits

_GREEDY_BELOW = 1e-6
_PENALTY = 2.0
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
    picked = body.token_ids_logprob
    nested = picked is not None and any(isinstance(one, list) for one in picked)
    columns = zip(
        _each(body.return_logprob, count, 0, "return_logprob"),
        _each(body.logprob_start_len, count, -1, "logprob_start_len"),
        _each(body.top_logprobs_num, count, 0, "top_logprobs_num"),
        _each(picked, count, [], "token_ids_logprob") if nested else [picked or []] * count,
        strict=True,
    )
    wanted = [
        Wanted(
            log_probs=bool(log_probs),
            log_probs_from=start if log_probs else -1,
            top=top if log_probs else 0,
            token_ids=tuple(chosen) if log_probs else (),
            texts=bool(body.return_text_in_logprobs),
            prompt_ids=bool(body.return_prompt_token_ids),
            stream=bool(body.stream),
        )
        for log_probs, start, top, chosen in columns
    ]
    rids = _rids(body.rid, count, many=many, new_rid=new_rid)
    items = [
        Item(rid=rid, text=text, input_ids=one, sampling=params, wanted=want)
        for rid, text, one, params, want in zip(rids, texts, ids, sampling, wanted, strict=True)
    ]
    return Call(items=tuple(items), samples=samples.pop(), many=many, stream=bool(body.stream))


def checked(body: SamplingBody, *, vocab: int, eos_id: int | None, room: int) -> Sampling:
    """The sampling parameters, normalised as SGLang does it; ``room`` is used where ``max_new_tokens`` is null.

    Raises:
      Refusal: a value is out of its range, or needs a grammar.

    """
    _check_ranges(body, vocab)
    temperature, top_k = _or(body.temperature, 1.0), _or(body.top_k, EVERY_TOKEN)
    if temperature < _GREEDY_BELOW:
        temperature, top_k = 1.0, 1
    stops = {*(body.stop_token_ids or ()), *(() if eos_id is None else (eos_id,))}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    patterns = [body.stop_regex] if isinstance(body.stop_regex, str) else body.stop_regex or []
    return Sampling(
        max_new_tokens=_or(body.max_new_tokens, room),
        temperature=temperature,
        limits=Limits(
            top_k=EVERY_TOKEN if top_k == -1 else top_k, top_p=_or(body.top_p, 1.0), min_p=_or(body.min_p, 0.0)
        ),
        penalties=Penalties(
            frequency=_or(body.frequency_penalty, 0.0),
            presence=_or(body.presence_penalty, 0.0),
            repetition=_or(body.repetition_penalty, 1.0),
            min_new_tokens=_or(body.min_new_tokens, 0),
            logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
        ),
        stop=tuple(one for one in stop if one),
        stop_regex=tuple(patterns),
        stop_ids=frozenset() if body.ignore_eos else frozenset(stops),
        skip_special_tokens=body.skip_special_tokens is not False,
        no_stop_trim=bool(body.no_stop_trim),
        seed=body.sampling_seed,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_ranges(body: SamplingBody, vocab: int) -> None:
    limit = body.max_new_tokens
    least = _or(body.min_new_tokens, 0)
    bias = body.logit_bias
    checks = {
        f"temperature must be a non-negative finite number, got {body.temperature}.": body.temperature is None
        or (math.isfinite(body.temperature) and body.temperature >= 0),
        f"top_p must be in (0, 1], got {body.top_p}.": 0 < _or(body.top_p, 1.0) <= 1,
        f"min_p must be in [0, 1], got {body.min_p}.": 0 <= _or(body.min_p, 0.0) <= 1,
        f"top_k must be -1 (disable) or at least 1, got {body.top_k}.": body.top_k in {None, -1}
        or _or(body.top_k, 1) >= 1,
        f"frequency_penalty must be in [-2, 2], got {body.frequency_penalty}.": abs(_or(body.frequency_penalty, 0.0))
        <= _PENALTY,
        f"presence_penalty must be in [-2, 2], got {body.presence_penalty}.": abs(_or(body.presence_penalty, 0.0))
        <= _PENALTY,
        f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {body.repetition_penalty}.": 0
        < _or(body.repetition_penalty, 1.0)
        <= _PENALTY,
        f"max_new_tokens must be at least 0, got {limit}.": limit is None or limit >= 0,
        f"min_new_tokens must be in [0, max_new_tokens({limit})], got {least}.": least >= 0
        and (limit is None or least <= limit),
        f"logit_bias must has keys in [0, {vocab - 1}], got {list(bias)}.": all(
            token.isdigit() and int(token) < vocab for token in bias
        ),
        "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when the server is launched "
        "with --grammar-backend none": not (body.json_schema or body.regex or body.ebnf or body.structural_tag),
    }
    for message, holds in checks.items():
        if not holds:
            raise invalid(message)
