"""The events in the lives of groups and samples, as values: the engine tells its ledger these, and the ledger writes them down.

One ``record(events)`` call is one transaction: either all of them are on disk or none is.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import attrs

from .enums import Cause
from .lifecycle import State
from .samples import SampleCounts
from .turn_log import RecordedTurn
from .values import Failure, Group, GroupId, Prompt, QuarantineReport, Trajectory

NO_WASTE: Final[Mapping[Cause, int]] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class Pulled:
    """Prompts left the source; ``source_state`` is the source's state after that."""

    prompts: tuple[Prompt, ...]
    source_state: Mapping[str, object]


@attrs.frozen(kw_only=True)
class Requeued:
    """An attempt ended without a result; ``attempts`` and ``unpenalized`` are the group's counts so far, this one included.

    ``samples`` are the tries of each sample, by index; empty if none was tried in vain. The kept samples stay. A finished
    group that is too old (``Cause.STALE``) waits again without samples: those that are still fresh enough are recorded
    after this event, in the same transaction, each as a ``SampleKept``. ``wasted`` here and in other events: the tokens
    that were sampled for the group in vain so far, by cause.
    """

    id: GroupId
    attempt: int
    cause: Cause
    attempts: int
    unpenalized: int
    error: Failure | None = None
    samples: tuple[SampleCounts, ...] = ()
    wasted: Mapping[Cause, int] = NO_WASTE


@attrs.frozen(kw_only=True)
class SampleKept:
    """A sample of a waiting group is finished, and stays until the group settles. Its prompt must be the group's.

    Written in the background, so it may come late. Of two trajectories of one sample that of the newer attempt counts. The
    sample of a group that has settled is ignored: a ready group has its samples in its body. ``tokens`` here and in other
    events: how many were sampled for it. ``scored``: False if only its reward is missing.
    """

    id: GroupId
    attempt: int
    trajectory: Trajectory
    tokens: int = 0
    scored: bool = True


@attrs.frozen(kw_only=True)
class SamplesDropped:
    """Kept samples of a waiting group are too old, and will be sampled again. Samples that are not kept are ignored."""

    id: GroupId
    indices: tuple[int, ...]


@attrs.frozen(kw_only=True)
class SamplesTried:
    """Tries at samples of a waiting group failed. ``samples`` are the tries of each sample so far, by index.

    Written in the background, like ``SampleKept``: a sample that fails each time must not start over after a restart.
    """

    id: GroupId
    samples: tuple[SampleCounts, ...]
    wasted: Mapping[Cause, int] = NO_WASTE


@attrs.frozen(kw_only=True)
class TurnRecorded:
    """A turn of a sample of a waiting group is finished; the sample is not. Written in the background, like ``SampleKept``.

    The record goes when the sample is kept, and when its group settles.
    """

    id: GroupId
    index: int
    record: RecordedTurn


@attrs.frozen(kw_only=True)
class TurnsDropped:
    """Recorded turns of a sample, by their numbers, will not be given back. Those that are not there are ignored."""

    id: GroupId
    index: int
    numbers: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Ready:
    """A group is finished and waits for delivery. A ready group replaces its prompt and its kept samples."""

    group: Group
    tokens: int = 0
    wasted: Mapping[Cause, int] = NO_WASTE


@attrs.frozen(kw_only=True)
class Filtered:
    """A finished group was dropped by the user's filter."""

    id: GroupId
    attempt: int
    reason: str
    tokens: int = 0
    wasted: Mapping[Cause, int] = NO_WASTE


@attrs.frozen(kw_only=True)
class Quarantined:
    """A group was given up. Its kept samples stay in the ledger.

    ``unscored``: the trajectories of samples whose scorer failed for good; they can be scored again later.
    """

    report: QuarantineReport
    unscored: tuple[Trajectory, ...] = ()
    wasted: Mapping[Cause, int] = NO_WASTE


@attrs.frozen(kw_only=True)
class Retried:
    """A quarantined group waits again, with its samples and with new tries."""

    id: GroupId


@attrs.frozen(kw_only=True)
class Rescored:
    """Rescoring ``number`` is through with a group.

    A group that is ready, delivered or acked has ``group`` as its new body. One that is waiting or quarantined has
    ``kept`` and ``unscored`` in place of the stored trajectories of the same samples, and is quarantined with ``report``
    if there is one.
    """

    id: GroupId
    number: int
    group: Group | None = None
    kept: tuple[Trajectory, ...] = ()
    unscored: tuple[Trajectory, ...] = ()
    report: QuarantineReport | None = None


@attrs.frozen(kw_only=True)
class Delivered:
    """A batch was handed to the trainer as step ``step``."""

    step: int
    ids: tuple[GroupId, ...]


@attrs.frozen(kw_only=True)
class Acked:
    """The batch of step ``step`` will never be asked for again."""

    step: int
    ids: tuple[GroupId, ...]


@attrs.frozen(kw_only=True)
class Restored:
    """The trainer went back to step ``step``: these groups, delivered after it and not acked, are ready again."""

    step: int
    ids: tuple[GroupId, ...]


@attrs.frozen(kw_only=True)
class VersionChanged:
    """The engine's newest weight version. ``named_by``: the URLs of the servers that named it themselves."""

    version: int
    named_by: tuple[str, ...] = ()


LedgerEvent: TypeAlias = (
    Pulled
    | Requeued
    | SampleKept
    | SamplesDropped
    | SamplesTried
    | TurnRecorded
    | TurnsDropped
    | Ready
    | Filtered
    | Quarantined
    | Retried
    | Rescored
    | Delivered
    | Acked
    | Restored
    | VersionChanged
)


@attrs.frozen(kw_only=True)
class RunIdentity:
    """The identity of a run: a ledger of another identity is refused.

    ``settings`` are what the user says must not change, by name.
    """

    source: str
    samples_per_prompt: int
    settings: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Unfinished:
    """A group that was pulled and not settled when the last run ended, with the counts of its attempts.

    ``samples`` are the tries of each sample as of the last requeue, by index, or empty; ``kept`` the finished samples, by
    index; ``unscored`` those that only lack a reward; ``turns`` the recorded turns of the others, by index, as they finished.
    """

    prompt: Prompt
    attempt: int
    attempts: int
    unpenalized: int
    samples: tuple[SampleCounts, ...] = ()
    kept: tuple[Trajectory, ...] = ()
    unscored: tuple[Trajectory, ...] = ()
    wasted: Mapping[Cause, int] = NO_WASTE
    turns: Mapping[int, tuple[RecordedTurn, ...]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Stored:
    """A group with everything that a ledger has of it, for rescoring.

    ``place`` orders groups by their pull. ``trajectories`` are those of its body or its stored samples, by index;
    ``tokens`` how many were sampled for them, ``wasted`` how many in vain. ``group`` is the body of a group that is finished, ``report`` the report of
    one that is quarantined.
    """

    place: int
    state: State
    attempt: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    tokens: int = 0
    wasted: Mapping[Cause, int] = NO_WASTE
    group: Group | None = None
    report: QuarantineReport | None = None


@attrs.frozen(kw_only=True)
class Rescoring:
    """A rescoring of a ledger, as it begins.

    ``goes_on``: an interrupted one is taken up. ``left`` counts the groups to score, ``skipped`` others by the reason.
    """

    number: int
    goes_on: bool
    samples_per_prompt: int
    left: int
    skipped: Mapping[str, int]


@attrs.frozen(kw_only=True)
class Recovered:
    """The memory that a ledger has of the runs before this one; empty for a new one.

    ``ready`` holds finished groups in their order; ``delivered`` those handed out and not acked, with their step.
    ``acked_step`` is the highest step that was acked: no restore may go back to it. ``named_by`` are the servers that named
    ``weight_version``, and ``top_version`` is the highest version that ever was the newest one (0: not known).
    """

    source_state: Mapping[str, object] | None = None
    unfinished: tuple[Unfinished, ...] = ()
    ready: tuple[Group, ...] = ()
    delivered: tuple[tuple[int, tuple[Group, ...]], ...] = ()
    quarantined: tuple[QuarantineReport, ...] = ()
    filtered: int = 0
    acked: int = 0
    next_step: int = 0
    weight_version: int | None = None
    named_by: tuple[str, ...] = ()
    top_version: int = 0
    acked_step: int | None = None
