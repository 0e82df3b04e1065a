"""The JSON body of ``/generate``, decoded: names and types as in SGLang's contract, nothing checked beyond them."""

import re
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from ._refusal import malformed, schema
from ._sampler import EVERY_TOKEN

T = TypeVar("T")
OneOrMany: TypeAlias = T | list[T] | None


class SamplingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """``sampling_params``: an unknown key is refused. None means the default."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = EVERY_TOKEN
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_new_tokens: int | None = 0
    n: int | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] = {}
    sampling_seed: int | None = None
    custom_params: Any = None
    beam_width: int | None = None
    watermark: Any = None
    choice: list[str] = []


class GenerateBody(msgspec.Struct, kw_only=True, gc=False):
    """The fields that this server looks at; unknown ones are ignored, as in SGLang."""

    rid: str | list[str] | None = None
    text: str | list[str] | None = None
    input_ids: msgspec.Raw = msgspec.Raw(b"null")
    input_embeds: msgspec.Raw = msgspec.Raw(b"null")
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_hidden_states: bool | list[bool] | str | None = None
    stream: bool | None = False


_DECODER = msgspec.json.Decoder(GenerateBody)
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_FLAT = msgspec.json.Decoder(list[_Int64])
_NESTED = msgspec.json.Decoder(list[list[_Int64]])
# What pydantic would turn into the right type passes SGLang's first check and fails its second, which has another shape.
_SECOND_CHECK = re.compile(r"`\$\.sampling_params[.\[]|Expected `bool[^`]*`, got `int`")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_SAMPLING_KEYS = ", ".join(f"`{name}`" for name in SamplingBody.__struct_fields__)
_NEST = re.compile(rb"\s*\[\s*\[")


def decode_generate(body: bytes) -> GenerateBody:
    """The body of a call.

    Raises:
      Refusal: it is no JSON, or not of this form.

    """
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown:
            raise schema(f"unknown field `{unknown['name']}`, expected one of {_SAMPLING_KEYS}") from error
        raise (schema if _SECOND_CHECK.search(str(error)) else malformed)(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(f"[{{'type': 'json_invalid', 'loc': ('body',), 'msg': {str(error)!r}}}]") from error


def decode_ids(raw: msgspec.Raw) -> tuple[list[list[int]] | None, bool]:
    """``input_ids`` as a list of prompts, and whether it was one: ``[1, 2]`` is a single prompt, ``[[1], [2]]`` two.

    Raises:
      Refusal: it is neither.

    """
    data = bytes(raw)
    try:
        if data == b"null":
            return None, False
        if _NEST.match(data):
            return _NESTED.decode(data), True
        return [_FLAT.decode(data)], False
    except msgspec.ValidationError as error:
        raise malformed(f"input_ids: {error}") from error
