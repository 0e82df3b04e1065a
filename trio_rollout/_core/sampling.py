"""Sampling parameters, named and defined as SGLang names them."""

from collections.abc import Iterable, Mapping

import attrs

from .checks import at_least, between


def _mapping(value: Mapping[str, object]) -> Mapping[str, object]:
    return dict(value)


def _ids(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


def _strings(value: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """The sampling parameters of one turn.

    ``temperature`` in [0, 1e-6) is greedy; ``top_k=-1`` keeps every token. ``extra`` is sent as it is and wins over the
    named fields (``regex``, ``json_schema``, ``logit_bias``, …).

    Raises:
      SettingsError: a field is out of its range; the message names the field, the value and the range.
    """

    max_new_tokens: int = attrs.field(default=128, validator=at_least(0))
    temperature: float = attrs.field(default=1.0, converter=float, validator=at_least(0.0))
    top_p: float = attrs.field(default=1.0, converter=float, validator=between(0.0, 1.0, open_low=True))
    top_k: int = attrs.field(default=-1, validator=at_least(-1))
    min_p: float = attrs.field(default=0.0, converter=float, validator=between(0.0, 1.0))
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    extra: Mapping[str, object] = attrs.field(factory=dict, converter=_mapping)
