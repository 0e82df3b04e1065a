"""``trio-rollout inspect``: look at a folder of results, also while a run writes it."""

from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from .._core.lifecycle import State
from .._core.values import GroupId
from ..errors import LedgerError
from ..ledger import GroupSummary, LedgerReader, read_ledger
from ._group_view import group_lines, printable, summary_line
from ._outcome import quarantine_line
from ._overview import Overview, overview_tables

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
