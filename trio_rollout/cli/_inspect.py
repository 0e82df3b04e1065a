"""``trio-rollout inspect``: the content of a folder of results, also while a run writes it.

The overview counts states, causes, attempts, versions and rewards from the groups' summaries, without their bodies. A single
group is shown as text: its prompt, its trajectories, its last error.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

import attrs
import click
from rich.console import Console, RenderableType
from rich.console import Group as Rows
from rich.table import Table

from .._core.enums import Cause
from .._core.lifecycle import State
from .._core.values import Failure, Group, GroupId, Prompt, Segment, Trajectory
from ..errors import LedgerError
from ..ledger import GroupSamples, GroupSummary, LedgerReader, read_ledger
from ._display import open_output, printable, printing
from ._options import option
from ._outcome import RewardTally, Spread, error_line, number_of, quarantine_line

_STATES = click.Choice([state.value for state in State], case_sensitive=False)
# Token ids that are shown of a prompt or a response without text.
_MOST_IDS = 64


@click.command("inspect", short_help="Show the groups in a folder of results.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("group", metavar="[GROUP]", required=False)
@option("--state", "List the groups in this state, one on each line; may be repeated.", multiple=True, type=_STATES)
def inspect(directory: Path, group: str | None, state: tuple[str, ...]) -> None:
    """Show the states, causes, attempts, weight versions and rewards of the groups in a folder of results.

    With GROUP, an id such as "0/17" (epoch and prompt) or "17" (epoch 0), show the prompt and the trajectories of that
    group as text. A group that is waiting or quarantined has those of the samples that were finished.
    """
    with read_ledger(directory) as reader, printing():
        if group is not None:
            summary = _find(reader, group)
            for line in group_lines(summary, reader.group_by_id(summary.id), reader.samples(summary.id)):
                click.echo(printable(line))
        elif state:
            for summary in reader.summaries(*map(State, state)):
                click.echo(printable(summary_line(summary)))
        else:
            _show_all(reader, open_output())


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


def _find(reader: LedgerReader, text: str) -> GroupSummary:
    epoch, slash, prompt = text.partition("/")
    with_epoch = [GroupId(int(epoch), prompt)] if slash and epoch.isdecimal() else []
    for gid in (*with_epoch, GroupId(0, text)):  # a prompt's id may also look like ``0/p3``
        if (found := reader.summary_by_id(gid)) is not None:
            return found
    raise LedgerError(f"no group {text!r}: give EPOCH/PROMPT, or the prompt's id for epoch 0")


@final
@attrs.define(eq=False)
class Overview:
    """Counts over the groups of a ledger. ``causes`` counts each group's last requeue or end."""

    causes: Counter[Cause] = attrs.field(factory=Counter)
    attempts: Counter[int] = attrs.field(factory=Counter)
    versions: Counter[tuple[int, int]] = attrs.field(factory=Counter)
    rewards: RewardTally = attrs.field(factory=RewardTally)

    def add(self, summaries: Iterable[GroupSummary]) -> None:
        """Count these groups."""
        for summary in summaries:
            self.attempts[max(summary.attempt, summary.attempts)] += 1
            if summary.cause is not None:
                self.causes[summary.cause] += 1
            if summary.oldest_version is not None and summary.newest_version is not None:
                self.versions[summary.oldest_version, summary.newest_version] += 1
            for reward in summary.rewards:
                self.rewards.add_reward(reward)


def _span(versions: tuple[int, int]) -> str:
    oldest, newest = versions
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def _counts(title: str, counts: Iterable[tuple[str, int]]) -> Iterator[RenderableType]:
    if rows := [(name, f"{count:,}") for name, count in counts]:
        yield _table([title, "groups"], rows)
        yield ""


def _rewards(rewards: Mapping[str, Spread]) -> Iterator[RenderableType]:
    rows = [
        (name, f"{one.count:,}", f"{one.total / one.count:.4f}", f"{one.low:.4f}", f"{one.high:.4f}")
        for name, one in rewards.items()
    ]
    if rows:
        yield _table(["reward", "rollouts", "mean", "min", "max"], rows)


def overview_tables(overview: Overview, states: Mapping[State, int]) -> RenderableType:
    """Return the overview as tables. ``states`` are the ledger's counts, which outlive the groups' rows."""
    return Rows(
        *_counts("state", ((state.value, count) for state, count in states.items())),
        *_counts("last cause", ((cause.value, count) for cause, count in overview.causes.most_common())),
        *_counts("attempts", ((str(number), count) for number, count in sorted(overview.attempts.items()))),
        *_counts("weight version", ((_span(key), count) for key, count in sorted(overview.versions.items()))),
        *_rewards(overview.rewards.by_name),
    )


def tries(summary: GroupSummary) -> str:
    """Return the number of attempts as text: a finished group has its last attempt's number, others count failures."""
    number = max(summary.attempt, summary.attempts)
    return number_of(number, "attempt") if number else "not tried yet"


def summary_line(summary: GroupSummary) -> str:
    """Return a group as one line: id, state, attempts, cause, versions, rewards, last error."""
    parts = [str(summary.id), summary.state.value, tries(summary)]
    if summary.kept:
        parts.append(number_of(summary.kept, "finished sample"))
    if summary.cause is not None:
        parts.append(f"last cause {summary.cause.value}")
    if summary.reason is not None:
        parts.append(summary.reason)
    if summary.newest_version is not None:
        parts.append(f"versions {summary.oldest_version}-{summary.newest_version}")
    if summary.rewards:
        parts.append(f"rewards {'; '.join(map(reward_text, summary.rewards))}")
    if summary.error is not None:
        parts.append(error_line(summary.error))
    return "  ".join(parts)


def reward_text(reward: float | Mapping[str, float] | None) -> str:
    """Return a reward as one line."""
    if isinstance(reward, Mapping):
        return ", ".join(f"{name} {value:g}" for name, value in reward.items())
    return "none" if reward is None else f"{reward:g}"


def group_lines(summary: GroupSummary, body: Group | Prompt | None, samples: GroupSamples) -> Iterator[str]:
    """Yield the lines of a group; ``body`` is the one in the ledger, ``samples`` are those beside the body."""
    yield summary_line(summary)
    if body is None:
        yield "(the space of this group has been reclaimed)"
        return
    yield "--- prompt"
    yield from _prompt(body.prompt if isinstance(body, Group) else body)
    trajectories = body.trajectories if isinstance(body, Group) else (*samples.kept, *samples.unscored)
    for trajectory in sorted(trajectories, key=lambda row: row.index):
        yield from _trajectory(trajectory)
    if summary.error is not None:
        yield from _failure(summary.error)


def _ids(ids: list[int]) -> str:
    more = f" ... {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return f"token ids {' '.join(map(str, ids[:_MOST_IDS]))}{more}"


def _prompt(prompt: Prompt) -> Iterator[str]:
    if prompt.messages is not None:
        for message in prompt.messages:
            yield f"[{message.get('role', '?')}] {message.get('content', '')}"
    elif prompt.text is not None:
        yield prompt.text
    elif prompt.input_ids is not None:
        yield _ids(prompt.input_ids.tolist())
    for tool in prompt.tools:
        yield f"tool: {dict(tool)}"
    if prompt.label is not None:
        yield f"label: {prompt.label}"
    if prompt.metadata:
        yield f"metadata: {dict(prompt.metadata)}"


def _segment(segment: Segment) -> Iterator[str]:
    versions = ", ".join(f"{span.version} [{span.start}:{span.stop}]" for span in segment.versions) or "none"
    prompt_length = len(segment.tokens) - segment.response_length
    yield f"  {prompt_length} + {segment.response_length} tokens, versions {versions}"
    response = segment.tokens[prompt_length:].tolist()
    yield segment.text or (_ids(response) if response else "(no tokens)")


def _trajectory(trajectory: Trajectory) -> Iterator[str]:
    yield (
        f"--- rollout {trajectory.index}: {trajectory.status.value}, stop {trajectory.stop.value}, "
        f"{number_of(trajectory.turns, 'turn')}, reward {reward_text(trajectory.reward)}"
    )
    for segment in trajectory.segments:
        yield from _segment(segment)
    if trajectory.error is not None:
        yield from _failure(trajectory.error)


def _failure(failure: Failure) -> Iterator[str]:
    yield f"last error: {failure}"
    if failure.traceback:
        yield failure.traceback.rstrip()
