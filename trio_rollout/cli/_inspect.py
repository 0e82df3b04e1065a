"""A ledger in numbers: states, causes, attempts, versions, rewards; built from summaries, never from bodies. Pure.

``trio-rollout inspect``: look at a folder of results, also while a run writes it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

import attrs
import click
from rich.console import Console, RenderableType
from rich.console import Group as Rows
from rich.table import Table

from .._core.enums import Cause
from .._core.lifecycle import State
from .._core.values import GroupId
from ..errors import LedgerError
from ..ledger import GroupSummary, LedgerReader, read_ledger
from ._group_view import group_lines, printable, summary_line
from ._outcome import quarantine_line


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


STATES = click.Choice([state.value for state in State], case_sensitive=False)


def _possible_ids(text: str) -> Iterator[GroupId]:
    """A prompt's id may itself look like ``0/p3``."""
    epoch, slash, prompt = text.partition("/")
    if slash and epoch.isdecimal():
        yield GroupId(int(epoch), prompt)
    yield GroupId(0, text)


def _find(reader: LedgerReader, text: str) -> GroupSummary:
    wanted = list(_possible_ids(text))
    found = {summary.id: summary for summary in reader.summaries() if summary.id in wanted}
    for gid in wanted:
        if gid in found:
            return found[gid]
    raise LedgerError(f"no group {text!r} (an id is EPOCH/PROMPT, or the prompt's id alone in epoch 0)")


def _show_all(reader: LedgerReader, console: Console) -> None:
    if (identity := reader.identity()) is not None:
        click.echo(printable(f"{identity.source}, {identity.samples_per_prompt} samples per prompt"))
        if identity.settings:
            click.echo(printable(", ".join(f"{name} {value}" for name, value in identity.settings.items())))
    version = reader.weight_version()
    click.echo(f"next step {reader.next_step()}, weight version {'unknown' if version is None else version}\n")
    overview = Overview()
    overview.add(reader.summaries())
    console.print(overview_tables(overview, reader.counts()))
    for report in reader.quarantined():
        click.echo(printable(quarantine_line(report)))


@click.command("inspect")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("group", metavar="[GROUP]", required=False)
@click.option("--state", multiple=True, type=STATES, help="List the groups in this state, one a line; may be repeated.")
def inspect(directory: Path, group: str | None, state: tuple[str, ...]) -> None:
    """Show what a folder of results holds: states, causes, attempts, versions and rewards of its groups.

    With GROUP, an id as "0/17" (epoch and prompt) or "17", show that group: its prompt and its trajectories as text.
    """
    with read_ledger(directory) as reader:
        if group is not None:
            summary = _find(reader, group)
            for line in group_lines(summary, reader.group_by_id(summary.id)):
                click.echo(printable(line))
        elif state:
            for summary in reader.summaries(*map(State, state)):
                click.echo(printable(summary_line(summary)))
        else:
            _show_all(reader, Console())
