"""Encoding of requests and decoding of answers: with the stdlib's json, or with this project's encoder and decoder."""

import json
from typing import Any, Protocol

import attrs
import numpy as np

from trio_rollout import SamplingParams, Stop
from trio_rollout.sglang._wire import GenerateRequest, RequestEncoder, decode_turn

from .values import Aborted, Prompt, Sample


class Codec(Protocol):
    """Both ways."""

    def encode(self, prompt: Prompt, rid: str) -> bytes:
        """The request's body."""
        ...

    def decode(self, body: bytes, prompt: Prompt, rid: str) -> Sample:
        """The answer. Raises Aborted if it is one to an aborted request."""
        ...


class JsonCodec:
    """The stdlib's json, and lists of numbers."""

    def __init__(self, tokens: int) -> None:
        self._sampling = {
            "max_new_tokens": tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "ignore_eos": False,
            "skip_special_tokens": True,
        }

    def encode(self, prompt: Prompt, rid: str) -> bytes:
        """See ``Codec``."""
        payload = {
            "rid": rid,
            "input_ids": prompt.input_ids,
            "sampling_params": self._sampling,
            "return_logprob": True,
            "stream": False,
        }
        return json.dumps(payload).encode()

    def decode(self, body: bytes, prompt: Prompt, rid: str) -> Sample:
        """See ``Codec``."""
        answer = json.loads(body)
        meta = answer["meta_info"]
        finish = meta["finish_reason"]["type"]
        if finish == "abort":
            raise Aborted(rid)
        rows = meta.pop("output_token_logprobs")
        ids = [row[1] for row in rows]
        if meta["id"] != rid or len(ids) != meta["completion_tokens"]:
            raise ValueError(f"the answer to {rid} is for {meta['id']} and has {len(ids)} tokens")
        return Sample(
            input_ids=prompt.input_ids,
            output_ids=ids,
            log_probs=[row[0] for row in rows],
            text=answer["text"],
            finish=finish,
            weight_version=meta["weight_version"],
            latency_s=meta["e2e_latency"],
            tokens=[*prompt.input_ids, *ids],
            loss_mask=[1] * len(ids),
            meta=meta,
        )


@attrs.define
class _Asked:
    """The facts of a request that this project's decoder needs."""

    attempted: str
    rid: str
    request: GenerateRequest

    def version_of(self, name: Any, /) -> int:
        """Versions are numbers; a server without one has 0."""
        return int(name) if str(name).isdigit() else 0


class OurCodec:
    """Our encoder and decoder in another client: what is left of a difference is the loop's and the client's."""

    def __init__(self, tokens: int) -> None:
        self._sampling = SamplingParams(max_new_tokens=tokens)
        self._encoder = RequestEncoder(None)

    def _request(self, prompt: Prompt) -> GenerateRequest:
        return self._encoder.encode(prompt.input_ids, self._sampling, {})

    def encode(self, prompt: Prompt, rid: str) -> bytes:
        """See ``Codec``."""
        return self._request(prompt).body(rid)

    def decode(self, body: bytes, prompt: Prompt, rid: str) -> Sample:
        """See ``Codec``."""
        turn = decode_turn(body, _Asked("POST /generate", rid, self._request(prompt)))
        if turn.stop is Stop.ABORT:
            raise Aborted(rid)
        return Sample(
            input_ids=turn.prompt_ids,
            output_ids=turn.output_ids,
            log_probs=turn.log_probs,
            text=turn.text,
            finish=turn.stop.value,
            weight_version=turn.weight_version,
            latency_s=turn.latency_s,
            tokens=np.concatenate((turn.prompt_ids, turn.output_ids)),
            loss_mask=np.ones(len(turn.output_ids), np.uint8),
        )
