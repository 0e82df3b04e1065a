"""Statistics of the engine and of the servers, as frozen values."""

from collections.abc import Mapping

import attrs

from .enums import Cause


class Counts(dict[Cause, int]):  # ruff: ignore[subclass-builtin]  a mapping that msgspec and users take for a dict
    """Counts by cause. The text has only those that are not zero."""

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{cause.value}: {count}" for cause, count in self.items() if count) + "}"


@attrs.frozen(kw_only=True)
class TokenCounts:
    """Sampled tokens by what became of them; those of evaluations are counted apart, in ``EngineStatistics.evaluations``.

    ``in_flight``: of tries that are under way. ``kept``: of finished samples whose group is not delivered yet, and of recorded
    turns that the next try gets back. ``wasted``: thrown away, by cause. ``delivered`` and ``filtered`` count whole groups.
    """

    in_flight: int
    kept: int
    delivered: int
    filtered: int
    wasted: Mapping[Cause, int]

    @property
    def wasted_total(self) -> int:
        """The tokens wasted for any cause."""
        return sum(self.wasted.values())


@attrs.frozen(kw_only=True)
class EvaluationCounts:
    """Counts of the engine's evaluations, by the meaning of the fields of ``EngineStatistics``; the others leave them out."""

    rollouts: int
    retries: Mapping[Cause, int]
    tokens: TokenCounts
    """Delivered are those of prompts that were evaluated to their end."""


_NO_EVALUATION = EvaluationCounts(
    rollouts=0, retries=Counts(), tokens=TokenCounts(in_flight=0, kept=0, delivered=0, filtered=0, wasted=Counts())
)


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """Counts since the engine was opened (with a ledger: since the ledger was begun). Groups, except where named otherwise.

    ``pulled == waiting + running + ready + delivered + acked + filtered + quarantined + returned`` at every moment.
    """

    pulled: int
    waiting: int
    running: int
    ready: int
    delivered: int
    acked: int
    filtered: int
    quarantined: int
    returned: int
    requeues: Mapping[Cause, int]
    """Requeues by cause, not groups: one group may be requeued several times."""
    retries: Mapping[Cause, int]
    """Tries of samples that ended without a result and were followed by another try, by cause."""
    tokens: TokenCounts
    late: int
    """Complete answers that came after their try had ended."""
    orphans: int
    """Requests that a server was still running when the time for their abort was over."""
    running_rollouts: int
    max_running: int
    rollouts: int = 0
    """Rollouts that began: tries at samples. Like ``generated_tokens`` those of this engine."""
    generated_tokens: int
    """Tokens sampled by finished turns, whatever became of their tries."""
    weight_version: int
    evaluations: EvaluationCounts = _NO_EVALUATION
    """Those of evaluations, since the engine was opened."""


@attrs.frozen(kw_only=True)
class ServerCounts:
    """One server: its URL, whether it gets work, what it has of ours."""

    url: str
    usable: bool
    paused: bool
    version: int | None
    in_flight: int
    requests: int


@attrs.frozen(kw_only=True)
class ServerStatistics:
    """All servers: each one's counts, open connections, aborts owed to paused servers, and orphans so far."""

    servers: tuple[ServerCounts, ...]
    connections: int
    owed_aborts: int
    orphans: int
    late: int
