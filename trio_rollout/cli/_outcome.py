"""The end of a run: its outcome, the exit status, and the summary. No I/O."""

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

import attrs
from rich.table import Table

from .._core.ledger_events import Recovered
from .._core.statistics import EngineStatistics, EvaluationCounts, TokenCounts
from .._core.values import Failure, Group, QuarantineReport
from ._display import by_cause, duration, scored, settled
from ._status import ExitStatus


class Ending(enum.Enum):
    """The reason why a run ended."""

    FINISHED = "finished"
    """The source ended and every group was settled."""
    DRAINED = "drained"
    """A signal came: no new groups were started, the running ones could finish within the grace."""
    CANCELLED = "cancelled"
    """A second signal came: the running groups were cancelled."""
    FAILED = "failed"
    """An error ended the run."""


@attrs.frozen(kw_only=True)
class Outcome:
    """The outcome of a run: its last counts, the quarantined groups, the rewards.

    ``statistics`` and ``quarantined`` count from the beginning of the ledger; ``rollouts`` (those that began), ``scored`` (those
    of finished groups), ``tokens`` and ``rewards`` are those of this run.
    """

    ending: Ending
    statistics: EngineStatistics
    quarantined: tuple[QuarantineReport, ...]
    total: int | None
    rollouts: int
    scored: int
    tokens: int
    rewards: Mapping[str, float]
    elapsed_s: float
    out: Path
    error: Exception | None = None

    @property
    def undone(self) -> int | None:
        """The number of groups that are left to do; None if the total is unknown."""
        return None if self.total is None else self.total - settled(self.statistics)


def finished_before(past: Recovered, *, total: int, out: Path) -> Outcome:
    """Return the outcome of a run that found nothing to do: all groups were settled by earlier ones."""
    quarantined = len(past.quarantined)
    none = TokenCounts(in_flight=0, kept=0, delivered=0, filtered=0, wasted={})
    running = dict.fromkeys(
        ("waiting", "running", "ready", "delivered", "returned", "running_rollouts", "max_running"), 0
    )
    counts = EngineStatistics(
        pulled=past.acked + past.filtered + quarantined,
        acked=past.acked,
        filtered=past.filtered,
        quarantined=quarantined,
        requeues={},
        retries={},
        tokens=none,
        evaluations=EvaluationCounts(rollouts=0, retries={}, tokens=none),
        late=0,
        orphans=0,
        generated_tokens=0,
        weight_version=past.weight_version or 0,
        **running,
    )
    return Outcome(
        ending=Ending.FINISHED,
        statistics=counts,
        quarantined=past.quarantined,
        total=total,
        rollouts=0,
        scored=0,
        tokens=0,
        rewards={},
        elapsed_s=0.0,
        out=out,
    )


def exit_status(outcome: Outcome) -> ExitStatus:
    """Return the exit status. A signal or a failure takes precedence over quarantined groups: the next run lists them."""
    if outcome.ending is Ending.FAILED:
        return ExitStatus.FAILED
    if outcome.ending is not Ending.FINISHED:
        return ExitStatus.INTERRUPTED
    return ExitStatus.QUARANTINED if outcome.statistics.quarantined else ExitStatus.SCORED


def _rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    counts = outcome.statistics
    total = "" if outcome.total is None else f" of {outcome.total}"
    yield "groups scored", f"{scored(counts)}{total}"
    if counts.filtered:
        yield "groups filtered", str(counts.filtered)
    yield "groups quarantined", str(counts.quarantined)
    yield "rollouts in this run", str(outcome.rollouts)
    if outcome.scored != outcome.rollouts:  # of quarantined groups, tried again, or finished by an earlier run
        yield "rollouts of scored groups", str(outcome.scored)
    for name, mean in outcome.rewards.items():
        yield f"mean {name} in this run", f"{mean:.4f}"
    yield "tokens in this run", f"{outcome.tokens:,}"
    if outcome.elapsed_s > 0:
        yield "tokens/s", f"{outcome.tokens / outcome.elapsed_s:,.0f}"
    yield "retries", by_cause(counts.retries) or "none"
    yield "requeues", by_cause(counts.requeues) or "none"
    yield "tokens wasted", by_cause(counts.tokens.wasted) or "none"
    if counts.late or counts.orphans:
        yield "late answers, orphans", f"{counts.late}, {counts.orphans}"
    yield "weight version", str(counts.weight_version)
    yield "time", duration(outcome.elapsed_s)


def summary(outcome: Outcome) -> Table:
    """Return the table at the end of a run."""
    table = Table(title=f"{outcome.out}: {outcome.ending.value}", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in _rows(outcome):
        table.add_row(name, value)
    return table


def quarantine_line(report: QuarantineReport) -> str:
    """Return a quarantined group as one line: id, cause, attempts, last error."""
    tries = number_of(report.attempts, "attempt")
    return f"quarantined {report.id}: {report.cause.value} after {tries}: {error_line(report.error)}"


def closing_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines after the table: the quarantined groups, and how to resume a run that is not complete."""
    for report in outcome.quarantined:
        yield quarantine_line(report)
    if outcome.ending is Ending.FINISHED:
        return
    undone = outcome.undone
    if undone == 0:
        yield f"{outcome.ending.value}: no groups are left to do"
        return
    left = "an unknown number of groups is" if undone is None else f"{undone} of {outcome.total} groups are"
    yield (
        f"{outcome.ending.value}: {left} left to do. Run the same command again to resume in {outcome.out}: finished groups "
        "are skipped, quarantined groups stay quarantined unless --retry-quarantined is given"
    )


@final
@attrs.define(eq=False)
class Spread:
    """Count, sum, minimum and maximum of numbers."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        """Add one number."""
        self.count += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)


@final
@attrs.define(eq=False)
class RewardTally:
    """Rollouts and their rewards by name, in the order in which the names appeared. A plain number has the name ``reward``."""

    rollouts: int = 0
    by_name: dict[str, Spread] = attrs.field(factory=dict)

    def add(self, groups: Iterable[Group]) -> None:
        """Count the rewards of these groups."""
        for group in groups:
            for trajectory in group.trajectories:
                self.add_reward(trajectory.reward)

    def add_reward(self, reward: float | Mapping[str, float] | None) -> None:
        """Count a rollout and its reward; None if it has none."""
        self.rollouts += 1
        if reward is not None:
            for name, value in reward.items() if isinstance(reward, Mapping) else (("reward", reward),):
                self.by_name.setdefault(name, Spread()).add(value)

    def means(self) -> dict[str, float]:
        """Return the mean of each reward."""
        return {name: spread.total / spread.count for name, spread in self.by_name.items()}


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 attempt``, ``3 attempts``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def error_line(error: Failure) -> str:
    """Return the type and the message of an error as one line."""
    return " ".join(f"{error.type}: {error.message}".split())
