"""Settings of the engine: frozen, validated at construction. All times are seconds."""

import math
from collections.abc import Sequence
from typing import Any

import attrs

from ..errors import SettingsError
from .checks import at_least, between, instance, names_suggested, seconds, seconds_or_none, whole
from .enums import Resume


@names_suggested
@attrs.frozen(kw_only=True)
class Deadlines:
    """Limits by name. None, zero or less means: no limit (where a limit may be left out).

    ``group``: wall-clock time of one attempt, over everything it does. ``rollout``, ``turn``, ``tool``, ``reward``: the
    parts of it. ``no_progress``: longest time without a new token, turn or tool output. ``abort``: how long a cancelled
    request may take to be acknowledged. ``control``: one pause, resume or version call. ``drain``: leaving the engine,
    in all; it must exceed ``abort``, so that the cleanup of cancelled requests fits into it.
    """

    group: float | None = attrs.field(default=1800.0, validator=seconds_or_none)
    rollout: float | None = attrs.field(default=None, validator=seconds_or_none)
    turn: float | None = attrs.field(default=600.0, validator=seconds_or_none)
    no_progress: float | None = attrs.field(default=None, validator=seconds_or_none)
    reward: float | None = attrs.field(default=300.0, validator=seconds_or_none)
    tool: float | None = attrs.field(default=300.0, validator=seconds_or_none)
    abort: float = attrs.field(default=5.0, validator=seconds)
    control: float = attrs.field(default=30.0, validator=seconds)
    drain: float = attrs.field(default=30.0, validator=seconds)

    def __attrs_post_init__(self) -> None:
        if self.abort >= self.drain:
            raise SettingsError(
                f"Deadlines.abort: got {self.abort}, allowed: below drain ({self.drain}), or a drain could not wait "
                "for the aborts it sends"
            )


def _exceptions(_: object, field: "attrs.Attribute[Any]", value: Sequence[Any]) -> None:
    known = isinstance(value, tuple) and all(
        "." in item if isinstance(item, str) else isinstance(item, type) and issubclass(item, BaseException)
        for item in value
    )
    if not known:
        raise SettingsError(
            f'Retry.{field.name}: got {value!r}, allowed: a tuple of exception classes or of their names, "module.Class"'
        )


@names_suggested
@attrs.frozen(kw_only=True)
class Retry:
    """The number of tries of a sample, and the backoff between them.

    ``max_attempts``: tries that end by DEADLINE, NO_PROGRESS or ERROR. ``max_free``: tries in a row that end for any other
    cause without one new token. ``infrastructure``: exceptions that mean what ``errors.InfrastructureError`` means, as
    classes or as "module.Class", subclasses included. The backoff is ``backoff_base`` seconds, doubled with each try up to
    ``backoff_max``; ``jitter`` is its random share.
    """

    max_attempts: int = attrs.field(default=3, validator=whole(1))
    max_free: int = attrs.field(default=100, validator=whole(1))
    infrastructure: tuple[type[BaseException] | str, ...] = attrs.field(
        default=(ConnectionError, "httpx.TransportError"), validator=_exceptions
    )
    backoff_base: float = attrs.field(default=0.5, converter=float, validator=at_least(0.0))
    backoff_max: float = attrs.field(default=30.0, converter=float, validator=at_least(0.0))
    jitter: float = attrs.field(default=0.5, converter=float, validator=between(0.0, 1.0))


@names_suggested
@attrs.frozen(kw_only=True)
class Pace:
    """Keep groups fresh by admission: none is started that could become too old, and the oldest is delivered first.

    The policy foresees one new version a batch. If the trainer makes more of them, groups that are too old are requeued
    with cause STALE.
    """


@names_suggested
@attrs.frozen(kw_only=True)
class Discard:
    """Keep groups fresh at delivery: a group that is too old is requeued with cause STALE.

    ``max_recycles``: a group requeued so often for this cause is reported as starved.
    """

    max_recycles: int = attrs.field(default=10, validator=whole(1))


@names_suggested
@attrs.frozen(kw_only=True)
class Staleness:
    """The age that a group may have, in weight versions; None: any age.

    ``max_versions`` bounds how far a group's oldest token may lie behind the newest weights, ``spread`` how far it may lie
    behind the group's newest token (0: one version a group). Samples beyond ``spread`` are sampled again.
    """

    max_versions: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(0)))
    spread: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(0)))
    policy: Pace | Discard = attrs.field(factory=Pace, validator=instance(Pace, Discard))

    def oldest_allowed(self, version: int, *, newest: float) -> float:
        """Return the lowest version that a token may have; -inf for any.

        ``version``: that of the newest weights; ``newest``: that of the group's newest token.
        """
        oldest = -math.inf if self.max_versions is None else version - self.max_versions
        return oldest if self.spread is None else max(oldest, newest - self.spread)


def _resume(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
    if not isinstance(value, Resume):
        allowed = ", ".join(map(str, Resume))
        raise SettingsError(f"EngineSettings.{field.name}: got {value!r}, allowed: {allowed}")


@names_suggested
@attrs.frozen(kw_only=True)
class EngineSettings:
    """Settings of one engine.

    ``samples_per_prompt`` rollouts make a group. ``min_samples``: a group is delivered once so many samples are finished and
    the others failed for good (``Group.missing`` names those); None means all. ``max_running`` counts rollouts; a group is
    admitted whole and each finished rollout frees its slot at once. ``max_ready`` bounds the finished groups that were not
    taken: while there are so many, including those whose group reward is awaited, no other group is admitted. ``partial``:
    an interrupted turn goes on from the tokens that it has, in place of a retry. ``resume``: with ``Resume.TURNS`` a sample
    that begins anew gets its finished turns back (docs/restarts.md). ``wait_for_weights``: no request is sent before the
    trainer's first ``weight_update`` (or ``note_weight_version``), because the servers may hold any weights until then.
    ``failure_budget``: the run stops with an error when so many groups in a row were quarantined with none becoming ready
    in between.

    Raises:
      SettingsError: a field is out of its range.
    """

    samples_per_prompt: int = attrs.field(default=8, validator=whole(1))
    min_samples: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(1)))
    max_running: int = attrs.field(default=256, validator=whole(1))
    max_ready: int = attrs.field(default=64, validator=whole(1))
    partial: bool = attrs.field(default=False, validator=instance(bool))
    resume: Resume = attrs.field(default=Resume.SAMPLES, validator=_resume)
    wait_for_weights: bool = attrs.field(default=False, validator=instance(bool))
    deadlines: Deadlines = attrs.field(factory=Deadlines, validator=instance(Deadlines))
    retry: Retry = attrs.field(factory=Retry, validator=instance(Retry))
    staleness: Staleness = attrs.field(factory=Staleness, validator=instance(Staleness))
    failure_budget: int = attrs.field(default=8, validator=whole(1))

    def __attrs_post_init__(self) -> None:
        if self.min_samples is not None and self.min_samples > self.samples_per_prompt:
            raise SettingsError(
                f"EngineSettings.min_samples: got {self.min_samples}, allowed: 1 to samples_per_prompt "
                f"({self.samples_per_prompt}), or None for all"
            )
        if self.max_running < self.samples_per_prompt:
            raise SettingsError(
                f"EngineSettings.max_running: got {self.max_running}, allowed: >= samples_per_prompt "
                f"({self.samples_per_prompt}), because a group is admitted whole"
            )
