"""The settings of a tiny server: its model, its limits, its delays."""

from pathlib import Path

import attrs

from .._core.checks import at_least, names_suggested, seconds, whole


@names_suggested
@attrs.frozen(kw_only=True)
class TinySettings:
    """Settings of one tiny server. All times are seconds.

    The model is a table of ``rows`` x ``vocab`` logits, indexed by the last ``context_tokens`` tokens: without collisions if
    ``(vocab + 1) ** context_tokens <= rows``, otherwise by a hash. ``weights`` (a file or a folder that ``TinyModel.save``
    wrote) replaces the random table of ``seed``, whose spread is ``scale``. ``vocab=None``: the shipped tokenizer's.
    ``eos_id=None``: its ``<|im_end|>``, if the vocabulary has it; with a negative one only limits end a text.

    ``max_running`` requests decode at once, ``max_queued`` may wait (None: any number); ``context_length`` bounds prompt
    and answer together, ``cache_tokens`` the prefix cache. ``step_delay``: the pause after every decode step.
    ``incremental``: streams carry deltas. ``script``: answers chosen by the prompt, for demonstrations.
    ``reasoning_parser``: the name, shown in /model_info, of the format of the model's thoughts.
    ``health_timeout``: the time that /health waits for a step. ``disconnect_poll``: the interval at which a request that does
    not stream checks its client's connection. ``abort_poll``: the interval at which a pause in mode abort checks again.

    Raises:
      SettingsError: a field is out of its range.
    """

    vocab: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(2)))
    context_tokens: int = attrs.field(default=3, validator=whole(1))
    rows: int = attrs.field(default=4096, validator=whole(1))
    scale: float = attrs.field(default=2.0, converter=float, validator=at_least(0.0))
    seed: int = attrs.field(default=0, validator=whole(0))
    weights: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    eos_id: int | None = None
    max_running: int = attrs.field(default=64, validator=whole(1))
    max_queued: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(0)))
    context_length: int = attrs.field(default=131_072, validator=whole(2))
    cache_tokens: int = attrs.field(default=1_000_000, validator=whole(0))
    step_delay: float = attrs.field(default=0.0, converter=float, validator=at_least(0.0))
    incremental: bool = False
    script: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    reasoning_parser: str | None = None
    health_timeout: float = attrs.field(default=20.0, converter=float, validator=seconds)
    disconnect_poll: float = attrs.field(default=4.0, converter=float, validator=seconds)
    abort_poll: float = attrs.field(default=1.0, converter=float, validator=seconds)
