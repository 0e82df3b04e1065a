"""Encodes a /generate request once, so that it can be sent any number of times, each time under a fresh rid."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from ..._core.arrays import ID_MAX, IdArray, id_array
from ..._core.sampling import SamplingParams, check_finite, with_most_tokens
from ..._http import BODY_LIMIT
from ...abc import ModelInput
from ...errors import ContextFull, RequestRejected, SamplingRejected

# Fields of a request that its sender has to control: an extra of that name is a mistake that would show much later.
_OURS: Final = frozenset({"rid", "text", "input_ids", "sampling_params", "return_logprob", "stream", "stream_options"})


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"a value of type {type(value).__name__} can't be sent as JSON")


_encode: Final = msgspec.json.Encoder(enc_hook=_plain).encode


# The tokens of an answer take some 50 bytes each, with text, id and log-prob; the longest tokens there are take a few hundred.
_ANSWER_BYTES: Final = 1 << 20
_ANSWER_BYTES_PER_TOKEN: Final = 512


@attrs.frozen
class Terms:
    """The encoded rest of a request, and what its answer may be."""

    body: bytes
    most: int | None
    """The largest number of tokens of the answer; None if the server decides."""
    vocab_size: int | None
    plain: bool
    """True if the answer has nothing for each token but what every answer has."""
    salt: str | None = None
    """The caller's own ``cache_salt``, which is no part of ``body``."""


@attrs.define
class GenerateRequest:
    """An encoded request. ``prompt_ids`` is None for a text prompt: the server turns it into ids and returns them."""

    prompt_ids: IdArray | None
    prompt: bytes
    terms: Terms

    def body(self, rid: str, version: int | None = None) -> bytes:
        """Return the JSON body under this rid (hex digits: nothing to escape).

        ``version``: the weights' version that is part of the cache salt, so that no prefix of other weights is reused; None:
        the salt is the caller's own, if there is one.
        """
        salt = self.terms.salt
        if version is not None:
            salt = f"{version}" if salt is None else f"{version}@{salt}"
        salted = b"" if salt is None else b'"cache_salt":%b,' % _encode(salt)
        return b'{"rid":"%b",%b%b,%b' % (rid.encode("ascii"), salted, self.prompt, self.terms.body)

    @property
    def answer_limit(self) -> int:
        """The longest answer in bytes. Arrays that the caller asked for may have any size, up to BODY_LIMIT."""
        if not self.terms.plain or self.terms.most is None:
            return BODY_LIMIT
        tokens = self.terms.most + (len(self.prompt) if self.prompt_ids is None else len(self.prompt_ids))
        return min(BODY_LIMIT, _ANSWER_BYTES + _ANSWER_BYTES_PER_TOKEN * tokens)


def _sampling_fields(sampling: SamplingParams) -> dict[str, object]:
    fields: dict[str, object] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
    }
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.sampling_seed is not None:
        fields["sampling_seed"] = sampling.sampling_seed
    fields.update(sampling.extra)
    return fields


def _check_vocabulary(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse ids in the parameters that are outside the vocabulary: one of ``stop_token_ids`` can kill a real SGLang."""
    for place, token in enumerate(sampling.stop_token_ids):
        if token >= vocab_size:
            where = f"SamplingParams.stop_token_ids[{place}]: got {token}"
            raise SamplingRejected(f"{where}, allowed: 0 to below the vocabulary's size {vocab_size}")
    bias = sampling.extra.get("logit_bias")
    for token in bias if isinstance(bias, Mapping) else ():
        if int(token) >= vocab_size:
            where = f"SamplingParams.extra['logit_bias']: got the token id {token}"
            raise SamplingRejected(f"{where}, allowed: 0 to below the vocabulary's size {vocab_size}")


def checked_ids(input_ids: Sequence[int] | npt.NDArray[Any], vocab_size: int | None) -> IdArray:
    """Return token ids as an array.

    Raises:
      RequestRejected: these are not token ids, there are none, or one is outside the vocabulary.
    """
    try:
        ids = id_array(input_ids)
    except (TypeError, ValueError) as error:
        raise RequestRejected(f"input_ids: {error}") from error
    if not len(ids):
        raise RequestRejected("input_ids: the prompt is empty")
    limit = ID_MAX + 1 if vocab_size is None else vocab_size
    unsigned = ids.view(np.uint32)  # negative ids become huge: one pass finds both kinds
    if int(unsigned.max()) >= limit:
        # A real SGLang doesn't refuse it: its scheduler dies.
        at = int(np.argmax(unsigned >= limit))
        raise RequestRejected(f"input_ids[{at}]: got {int(ids[at])}, allowed: 0 to below the vocabulary's size {limit}")
    return ids


@final
@attrs.define(eq=False)
class RequestEncoder:
    """Checks and encodes requests.

    The samples of a group have the same prompt, and most requests the same parameters: the last of both are kept as they
    were encoded, unless the prompt's array can still be changed.
    """

    vocab_size: int | None
    context_length: int | None = None
    _last_ids: tuple[IdArray, GenerateRequest] | None = None
    _last: tuple[SamplingParams, bool, Terms] | None = None

    def checked(self, input_ids: Sequence[int] | npt.NDArray[Any]) -> IdArray:
        """Return token ids as ``checked_ids`` does, without checking the prompt of a group's other samples again."""
        last = self._last_ids
        return last[0] if last is not None and last[0] is input_ids else checked_ids(input_ids, self.vocab_size)

    def encode(
        self,
        model_input: ModelInput,
        sampling: SamplingParams,
        extra: Mapping[str, object],
        *,
        stream: bool = False,
    ) -> GenerateRequest:
        """Check and encode a request.

        Raises:
          RequestRejected: no server would take it; the message names the field, the value and what is allowed.
            SamplingRejected if the field is a sampling parameter.
        """
        try:
            if isinstance(model_input, str):
                return self._of_text(model_input, sampling, extra, stream=stream)
            return self._of_ids(model_input, sampling, extra, stream=stream)
        except RequestRejected:
            raise
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise RequestRejected(f"the request can't be encoded as JSON: {error}") from error

    def _of_text(
        self, text: str, sampling: SamplingParams, extra: Mapping[str, object], *, stream: bool
    ) -> GenerateRequest:
        if not text:
            raise RequestRejected("text: the prompt is empty")
        prompt = b'"return_prompt_token_ids":true,"text":%b' % _encode(text)
        return GenerateRequest(None, prompt, self._terms(sampling, extra, stream=stream))

    def _of_ids(
        self,
        model_input: Sequence[int] | npt.NDArray[Any],
        sampling: SamplingParams,
        extra: Mapping[str, object],
        *,
        stream: bool,
    ) -> GenerateRequest:
        terms = self._terms(self._fitting(len(model_input), sampling), extra, stream=stream)
        last = self._last_ids
        if last is not None and last[0] is model_input:
            known = last[1]
            return known if known.terms is terms else GenerateRequest(known.prompt_ids, known.prompt, terms)
        ids = self.checked(model_input)
        listed = model_input if type(model_input) is list else ids.tolist()
        request = GenerateRequest(ids, b'"input_ids":%b' % _encode(listed), terms)
        if ids is model_input:  # read-only, and not a view of memory that can be changed
            self._last_ids = (ids, request)
        return request

    def _fitting(self, prompt: int, sampling: SamplingParams) -> SamplingParams:
        """Ask for no more tokens than fit: else a server refuses the whole request, or cuts its prompt."""
        if self.context_length is None or prompt + sampling.max_new_tokens <= self.context_length:
            return sampling
        room = self.context_length - prompt
        if room < 1:
            raise ContextFull(
                f"input_ids: {prompt} tokens leave no room for an answer, allowed: below the context's length "
                f"{self.context_length}"
            )
        return with_most_tokens(sampling, room)

    def _terms(self, sampling: SamplingParams, extra: Mapping[str, object], *, stream: bool) -> Terms:
        last = self._last
        if last is not None and last[0] is sampling and last[1] is stream and not extra:
            return last[2]
        taken = _OURS.intersection(extra)
        if taken:
            raise RequestRejected(f"extra: got {sorted(taken)}, allowed: fields that the client does not set itself")
        check_finite(extra, "extra")
        if self.vocab_size is not None:
            _check_vocabulary(sampling, self.vocab_size)
        fields = {"sampling_params": _sampling_fields(sampling), "return_logprob": True, "stream": stream, **extra}
        salt = fields.pop("cache_salt", None)
        if not isinstance(salt, str | None):
            raise RequestRejected(f"extra: got cache_salt={salt!r}, allowed: a string")
        terms = Terms(_encode(fields)[1:], sampling.max_new_tokens, self.vocab_size, not extra, salt)
        if not extra:
            self._last = (sampling, stream, terms)
        return terms
