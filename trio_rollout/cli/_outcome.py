"""What a run has seen of its groups' rewards: sums by name, so that a mean costs nothing to show.

How a run ended, the exit status that follows from it, and the summary at its end. Pure.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

import attrs
from rich.table import Table

from .._core.statistics import EngineStatistics
from .._core.values import Group, QuarantineReport
from ._display import duration, requeues, scored, settled


@final
@attrs.define(eq=False)
class RewardTally:
    """Sums and counts of rewards, by name; a plain number goes by the name ``reward``."""

    groups: int = 0
    rollouts: int = 0
    _sums: dict[str, float] = attrs.field(factory=dict)
    _counts: dict[str, int] = attrs.field(factory=dict)

    def add(self, groups: Iterable[Group]) -> None:
        """Count these groups."""
        for group in groups:
            self.groups += 1
            for trajectory in group.trajectories:
                self.rollouts += 1
                self._add(trajectory.reward)

    def _add(self, reward: float | Mapping[str, float] | None) -> None:
        if reward is None:
            return
        named = reward if isinstance(reward, Mapping) else {"reward": reward}
        for name, value in named.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """The mean of each reward, in the order in which the names appeared."""
        return {name: total / self._counts[name] for name, total in self._sums.items()}


class Ending(enum.Enum):
    """Why a run stopped."""

    FINISHED = "finished"
    """The source ended and every group was settled."""
    DRAINED = "drained"
    """An interrupt: no new groups, the running ones were let finish within the grace."""
    CANCELLED = "cancelled"
    """A second interrupt: the running groups were cancelled."""
    FAILED = "failed"
    """An error ended it."""


class ExitStatus(enum.IntEnum):
    """What the shell sees."""

    SCORED = 0
    """Every group was scored (or dropped by the filter)."""
    FAILED = 1
    """The run failed."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    QUARANTINED = 3
    """Some groups were given up; they are listed."""
    INTERRUPTED = 130
    """Ctrl-C (128 + SIGINT, as shells report it)."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What a run left: its last counts, the groups it gave up, the rewards it saw.

    ``statistics`` goes back to the ledger's beginning; ``rollouts``, ``tokens`` and ``rewards`` are this run's alone.
    """

    ending: Ending
    statistics: EngineStatistics
    quarantined: tuple[QuarantineReport, ...]
    total: int | None
    rollouts: int
    tokens: int
    rewards: Mapping[str, float]
    elapsed_s: float
    out: Path
    error: Exception | None = None

    @property
    def undone(self) -> int | None:
        """Groups still to be done; None while nobody knows how many there are."""
        return None if self.total is None else self.total - settled(self.statistics)


def exit_status(outcome: Outcome) -> ExitStatus:
    """An interrupt or a failure wins over quarantined groups: the run is not over, and the next one lists them."""
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
    for name, mean in outcome.rewards.items():
        yield f"mean {name} in this run", f"{mean:.4f}"
    yield "tokens in this run", f"{outcome.tokens:,}"
    if outcome.elapsed_s > 0:
        yield "tokens/s", f"{outcome.tokens / outcome.elapsed_s:,.0f}"
    yield "requeues", requeues(counts) or "none"
    if counts.late or counts.orphans:
        yield "late answers, orphans", f"{counts.late}, {counts.orphans}"
    yield "weight version", str(counts.weight_version)
    yield "time", duration(outcome.elapsed_s)


def summary(outcome: Outcome) -> Table:
    """The table at the end of a run."""
    table = Table(title=f"{outcome.out}: {outcome.ending.value}", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in _rows(outcome):
        table.add_row(name, value)
    return table


def quarantine_line(report: QuarantineReport) -> str:
    """One given-up group on one line: id, cause, attempts, last error."""
    tries = "1 attempt" if report.attempts == 1 else f"{report.attempts} attempts"
    error = " ".join(f"{report.error.type}: {report.error.message}".split())
    return f"quarantined {report.id}: {report.cause.value} after {tries}: {error}"


def closing_lines(outcome: Outcome) -> Iterator[str]:
    """What a user must know after the table: groups that were given up, work that is left and how to go on with it."""
    for report in outcome.quarantined:
        yield quarantine_line(report)
    if outcome.ending is Ending.FINISHED:
        return
    undone = outcome.undone
    if undone == 0:
        yield f"{outcome.ending.value}: nothing was left undone"
        return
    left = "an unknown number of groups is" if undone is None else f"{undone} of {outcome.total} groups are"
    yield f"{outcome.ending.value}: {left} left undone; run the same command again to go on with {outcome.out}"
