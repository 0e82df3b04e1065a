"""From an item of a call to a request for the scheduler: tokenise, check lengths and values, choose seed and script."""

import hashlib
from collections.abc import Callable
from typing import final

import attrs
import numpy as np

from ._body import SamplingBody
from ._call import Call, Item
from ._refusal import invalid
from ._request import Request, Sampling, Wanted
from ._sampling_params import checked
from ._script import Script
from ._settings import TinySettings
from ._tokenizer import TinyTokenizer


@final
@attrs.frozen(kw_only=True, eq=False)
class Submission:
    """What every request needs to know about its server."""

    settings: TinySettings
    tokenizer: TinyTokenizer
    eos_id: int | None
    script: Script | None
    new_rid: Callable[[], str]

    def request(self, item: Item, vocab: int) -> Request:
        """The request.

        Raises:
          Refusal: too long, or a value is out of its range.

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
        """For ``n`` > 1: one request without tokens for each prompt, and ``n`` of each, all with rids of their own."""
        once = SamplingBody(max_new_tokens=0)
        warmups = [
            attrs.evolve(item, rid=self.new_rid(), sampling=once, wanted=Wanted(), text=item.text)
            for item in call.items
        ]
        samples = [attrs.evolve(item, rid=self.new_rid()) for item in call.items for _ in range(call.samples)]
        return warmups, samples

    def _check_length(self, count: int, limit: int | None) -> int:
        """How many tokens may follow a prompt of ``count``."""
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
        """From ``sampling_seed``, else from the server's seed and the rid: never from who else is running."""
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
