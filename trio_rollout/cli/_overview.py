"""A ledger in numbers: states, causes, attempts, versions, rewards; built from summaries, never from bodies. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import final

import attrs
from rich.console import Group as Rows
from rich.console import RenderableType
from rich.table import Table

from .._core.enums import Cause
from .._core.lifecycle import State
from ..ledger import GroupSummary


@final
@attrs.define(eq=False)
class Spread:
    """Count, mean, least and greatest of numbers."""

    count: int = 0
    total: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, value: float) -> None:
        """Take one number in."""
        self.count += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)


@final
@attrs.define(eq=False)
class Overview:
    """What the summaries of a ledger add up to. ``causes`` counts each group's last requeue or end."""

    states: Counter[State] = attrs.field(factory=Counter)
    causes: Counter[Cause] = attrs.field(factory=Counter)
    attempts: Counter[int] = attrs.field(factory=Counter)
    versions: Counter[tuple[int, int]] = attrs.field(factory=Counter)
    rewards: dict[str, Spread] = attrs.field(factory=dict)

    def add(self, summaries: Iterable[GroupSummary]) -> None:
        """Count these groups."""
        for summary in summaries:
            self.states[summary.state] += 1
            self.attempts[max(summary.attempt, summary.attempts)] += 1
            if summary.cause is not None:
                self.causes[summary.cause] += 1
            if summary.oldest_version is not None and summary.newest_version is not None:
                self.versions[summary.oldest_version, summary.newest_version] += 1
            for reward in summary.rewards:
                self._reward(reward)

    def _reward(self, reward: float | Mapping[str, float] | None) -> None:
        if reward is None:
            return
        for name, value in reward.items() if isinstance(reward, Mapping) else (("reward", reward),):
            self.rewards.setdefault(name, Spread()).add(value)


def _span(versions: tuple[int, int]) -> str:
    oldest, newest = versions
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def _counts(title: str, rows: Iterable[tuple[str, int]]) -> Iterator[RenderableType]:
    table = Table(title, "groups", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[1].justify = "right"
    for name, count in rows:
        table.add_row(name, f"{count:,}")
    if table.row_count:
        yield table
        yield ""


def _rewards(rewards: Mapping[str, Spread]) -> Iterator[RenderableType]:
    table = Table("reward", "rollouts", "mean", "least", "greatest", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, spread in rewards.items():
        mean = spread.total / spread.count
        table.add_row(name, f"{spread.count:,}", f"{mean:.4f}", f"{spread.low:.4f}", f"{spread.high:.4f}")
    if table.row_count:
        yield table


def overview_tables(overview: Overview, states: Mapping[State, int]) -> RenderableType:
    """The overview as tables. ``states`` are the ledger's own counts, which go on after a group's row is gone."""
    return Rows(
        *_counts("state", ((state.value, count) for state, count in states.items())),
        *_counts("last cause", ((cause.value, count) for cause, count in overview.causes.most_common())),
        *_counts("attempts", ((str(number), count) for number, count in sorted(overview.attempts.items()))),
        *_counts("weight version", ((_span(key), count) for key, count in sorted(overview.versions.items()))),
        *_rewards(overview.rewards),
    )
