"""Settings of one tiny server: what it serves, its limits, and how slow or quirky it is."""

from pathlib import Path

import attrs

from .._core.checks import at_least, seconds, whole


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


@attrs.frozen(kw_only=True)
class TinySettings:
    """One tiny server. All times are seconds.

    The model is a table of ``rows`` x ``vocab`` logits, indexed by the last ``context_tokens`` tokens: without collisions
    where ``(vocab + 1) ** context_tokens <= rows``, else by a hash. ``weights`` (a file or a folder that ``TinyModel.save``
    wrote) replaces the random table of ``seed``, ``scale`` being its spread. ``vocab=None`` is the shipped tokenizer's.
    ``eos_id=None`` is its ``<|im_end|>``, where the vocabulary has it; with a negative one nothing ends a text but limits.

    ``max_running`` requests decode at once, ``max_queued`` may wait (None: any number); ``context_length`` bounds prompt
    and answer together; ``cache_tokens`` the prefix cache. ``step_delay`` is waited after every decode step.
    ``incremental``: streams carry deltas. ``script``: answers chosen by the prompt, for demonstrations.
    ``reasoning_parser``: the name that /model_info says, of the format in which the model writes thoughts.
    ``health_timeout``: how long /health waits for a sign of life. ``disconnect_poll``: how often a request that does not
    stream looks whether its client is still there. ``abort_poll``: how often a pause in abort mode looks again.

    Raises:
      SettingsError: a field is out of its range.

    """

    vocab: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(2)))
    context_tokens: int = attrs.field(default=3, validator=whole(1))
    rows: int = attrs.field(default=4096, validator=whole(1))
    scale: float = attrs.field(default=2.0, converter=float, validator=at_least(0.0))
    seed: int = attrs.field(default=0, validator=whole(0))
    weights: Path | None = attrs.field(default=None, converter=_path)
    eos_id: int | None = None
    max_running: int = attrs.field(default=64, validator=whole(1))
    max_queued: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(0)))
    context_length: int = attrs.field(default=131_072, validator=whole(2))
    cache_tokens: int = attrs.field(default=1_000_000, validator=whole(0))
    step_delay: float = attrs.field(default=0.0, converter=float, validator=at_least(0.0))
    incremental: bool = False
    script: Path | None = attrs.field(default=None, converter=_path)
    reasoning_parser: str | None = None
    health_timeout: float = attrs.field(default=20.0, converter=float, validator=seconds)
    disconnect_poll: float = attrs.field(default=4.0, converter=float, validator=seconds)
    abort_poll: float = attrs.field(default=1.0, converter=float, validator=seconds)
