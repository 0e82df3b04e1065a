"""Settings of the engine: frozen, validated at construction. All times are seconds."""

import attrs

from ..errors import SettingsError
from .checks import at_least, between, seconds, seconds_or_none, whole


@attrs.frozen(kw_only=True)
class Deadlines:
    """Limits by name. None, zero or less means: no limit (where a limit may be left out).

    ``group``: wall-clock time of one attempt, over everything it does. ``rollout``, ``turn``, ``tool``, ``reward``: the
    parts of it. ``no_progress``: longest time without a new token, turn or tool output. ``abort``: how long a cancelled
    request may take to be acknowledged. ``control``: one pause, resume or version call. ``drain``: leaving the engine,
    in all; it must exceed ``abort``, so that cancelled requests can be wrapped up within it.
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


@attrs.frozen(kw_only=True)
class Retry:
    """The number of tries of a group, and the backoff between them.

    ``max_attempts``: attempts that end by DEADLINE, NO_PROGRESS or ERROR. ``max_free``: requeues in a row for any other
    cause without one new token. The backoff is ``backoff_base`` seconds, doubled with each attempt up to ``backoff_max``;
    ``jitter`` is its random share.
    """

    max_attempts: int = attrs.field(default=3, validator=whole(1))
    max_free: int = attrs.field(default=100, validator=whole(1))
    backoff_base: float = attrs.field(default=0.5, converter=float, validator=at_least(0.0))
    backoff_max: float = attrs.field(default=30.0, converter=float, validator=at_least(0.0))
    jitter: float = attrs.field(default=0.5, converter=float, validator=between(0.0, 1.0))


@attrs.frozen(kw_only=True)
class Pace:
    """Keep groups fresh by admission: none is started that could become too old, and the oldest is delivered first.

    The policy foresees one new version a batch. If the trainer makes more of them, groups that are too old are requeued
    with cause STALE.
    """


@attrs.frozen(kw_only=True)
class Discard:
    """Keep groups fresh at delivery: a group that is too old is requeued with cause STALE.

    ``max_recycles``: a group requeued so often for this cause is reported as starved.
    """

    max_recycles: int = attrs.field(default=10, validator=whole(1))


@attrs.frozen(kw_only=True)
class Staleness:
    """The staleness bound: a group's oldest token may lie ``max_versions`` behind the newest version; None: any number."""

    max_versions: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(0)))
    policy: Pace | Discard = attrs.field(factory=Pace, validator=attrs.validators.instance_of((Pace, Discard)))


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Settings of one engine.

    ``samples_per_prompt`` rollouts make a group. ``max_running`` counts rollouts; a group is admitted whole and each
    finished rollout frees its slot at once. ``max_ready`` bounds the finished groups that were not taken: while there are
    so many, including those whose group reward is awaited, no other group is admitted. ``partial``: an interrupted turn
    goes on from the tokens that it has, in place of a requeue. ``failure_budget``: the run stops with an error when so many
    groups in a row were quarantined with none becoming ready in between.

    Raises:
      SettingsError: a field is out of its range.

    """

    samples_per_prompt: int = attrs.field(default=8, validator=whole(1))
    max_running: int = attrs.field(default=256, validator=whole(1))
    max_ready: int = attrs.field(default=64, validator=whole(1))
    partial: bool = False
    deadlines: Deadlines = attrs.field(factory=Deadlines, validator=attrs.validators.instance_of(Deadlines))
    retry: Retry = attrs.field(factory=Retry, validator=attrs.validators.instance_of(Retry))
    staleness: Staleness = attrs.field(factory=Staleness, validator=attrs.validators.instance_of(Staleness))
    failure_budget: int = attrs.field(default=8, validator=whole(1))

    def __attrs_post_init__(self) -> None:
        if self.max_running < self.samples_per_prompt:
            raise SettingsError(
                f"EngineSettings.max_running: got {self.max_running}, allowed: >= samples_per_prompt "
                f"({self.samples_per_prompt}), because a group is admitted whole"
            )
