"""What happens to groups, as values: the engine tells its ledger these, the ledger writes them down.

One ``record(events)`` call is one transaction: either all of them are on disk or none is.
"""

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from .enums import Cause
from .values import Failure, Group, GroupId, Prompt, QuarantineReport


@attrs.frozen(kw_only=True)
class Pulled:
    """Prompts left the source; ``source_state`` is the source's state after that."""

    prompts: tuple[Prompt, ...]
    source_state: Mapping[str, object]


@attrs.frozen(kw_only=True)
class Requeued:
    """An attempt ended without a result; ``attempts`` and ``unpenalized`` are the group's counts so far, this one included."""

    id: GroupId
    attempt: int
    cause: Cause
    attempts: int
    unpenalized: int
    error: Failure | None = None


@attrs.frozen(kw_only=True)
class Ready:
    """A group is finished and waits for delivery. A ready group replaces its prompt."""

    group: Group


@attrs.frozen(kw_only=True)
class Filtered:
    """A finished group was dropped by the user's filter."""

    id: GroupId
    attempt: int
    reason: str


@attrs.frozen(kw_only=True)
class Quarantined:
    """A group was given up."""

    report: QuarantineReport


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
    """The engine's newest weight version."""

    version: int


LedgerEvent: TypeAlias = (
    Pulled | Requeued | Ready | Filtered | Quarantined | Delivered | Acked | Restored | VersionChanged
)


@attrs.frozen(kw_only=True)
class RunIdentity:
    """What makes two runs the same: a ledger of another identity is refused.

    ``settings`` are what the user says must not change, by name.
    """

    source: str
    samples_per_prompt: int
    settings: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Unfinished:
    """A group that was pulled and not settled when the last run ended, with the counts of its attempts."""

    prompt: Prompt
    attempt: int
    attempts: int
    unpenalized: int


@attrs.frozen(kw_only=True)
class Recovered:
    """What a ledger remembers of the runs before this one; empty for a new one.

    ``ready`` holds finished groups in their order; ``delivered`` those handed out and not acked, with their step.
    ``acked_step`` is the highest step that was acked: no restore may go back to it.
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
    acked_step: int | None = None
