"""``trio-rollout inspect``: the content of a folder of results, also while a run writes it.

The overview counts states, causes, attempts, versions, tokens and rewards from the groups' summaries, without their bodies. A
single group is shown as text: its prompt, its trajectories, its last error.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TypeAlias, final

import attrs
import click
from rich.console import Console, RenderableType
from rich.console import Group as Rows
from rich.table import Table

from .._core.enums import Cause
from .._core.lifecycle import State
from .._core.statistics import TokenCounts
from .._core.values import Failure, Group, GroupId, Prompt, Segment, Trajectory
from ..errors import LedgerError
from ..ledger import GroupSamples, GroupSummary, LedgerReader, read_ledger
from ..tokenizer import load_tokenizer
from ._display import by_cause, open_output, printable, printing
from ._options import option
from ._outcome import RewardTally, Spread, error_line, number_of, quarantine_line

Decode: TypeAlias = Callable[[Sequence[int]], str]

_STATES = click.Choice([state.value for state in State], case_sensitive=False)
# Token ids that are shown of a prompt or a response without text.
_MOST_IDS = 64


@click.command("inspect", short_help="Show the groups in a folder of results.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("group", metavar="[GROUP]", required=False)
@option(
    "--tokenizer",
    "Folder with tokenizer.json: show the trajectories of GROUP as text in full, with the output of tools.",
    metavar="PATH",
)
@option("--state", "List the groups in this state, one on each line; may be repeated.", multiple=True, type=_STATES)
def inspect(directory: Path, group: str | None, tokenizer: str | None, state: tuple[str, ...]) -> None:
    """Show the states, causes, attempts, weight versions, tokens and rewards of the groups in a folder of results.

    With GROUP, an id such as "0/17" (epoch and prompt) or "17" (epoch 0), show the prompt and the trajectories of that
    group as text. A group that is waiting or quarantined has those of the samples that were finished.
    """
    with read_ledger(directory) as reader, printing():
        if group is not None:
            summary, decode = _find(reader, group), None if tokenizer is None else load_tokenizer(tokenizer).decode
            body = reader.group_by_id(summary.id)
            for line in group_lines(summary, body, reader.samples(summary.id), decode=decode):
                click.echo(printable(line))
        elif state:
            states = tuple(map(State, state))
            for summary in chain(reader.ended(*states), reader.summaries(*states)):
                click.echo(printable(summary_line(summary)))
        else:
            _show_all(reader, open_output())


def _show_all(reader: LedgerReader, console: Console) -> None:
    if (identity := reader.identity()) is not None:
        click.echo(printable(f"{identity.source}, {identity.samples_per_prompt} samples per prompt"))
        if identity.settings:
            click.echo(printable(", ".join(f"{name} {value}" for name, value in identity.settings.items())))
    version = reader.weight_version()
    click.echo(f"next step {reader.next_step()}, weight version {'none yet' if version is None else version}\n")
    if (reward := reader.rescoring()) is not None:
        click.echo(printable(f"scoring again with {reward} is not complete: run 'trio-rollout rescore' again\n"))
    overview = Overview()
    overview.add(chain(reader.ended(), reader.summaries()))
    console.print(overview_tables(overview, reader.counts(), reader.tokens()))
    for report in reader.quarantined():
        click.echo(printable(quarantine_line(report)))


def _find(reader: LedgerReader, text: str) -> GroupSummary:
    epoch, slash, prompt = text.partition("/")
    with_epoch = [GroupId(int(epoch), prompt)] if slash and epoch.isdecimal() else []
    for gid in (*with_epoch, GroupId(0, text)):  # a prompt's id may also look like ``0/p3``
        if (found := reader.summary_by_id(gid)) is not None:
            return found
    forgotten = reader.forgotten()
    older = f". {number_of(forgotten, 'group')} that ended earlier are only counted" if forgotten else ""
    raise LedgerError(f"no group {text!r}: give EPOCH/PROMPT, or the prompt's id for epoch 0{older}")


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


def _tokens(tokens: TokenCounts) -> Iterator[RenderableType]:
    counts = [("kept", tokens.kept), ("delivered", tokens.delivered), ("filtered", tokens.filtered)]
    counts += [(f"wasted: {cause.value}", lost) for cause, lost in tokens.wasted.items()]
    if rows := [(name, f"{count:,}") for name, count in counts if count]:
        yield _table(["sampled tokens", "tokens"], rows)
        yield ""


def _rewards(rewards: Mapping[str, Spread]) -> Iterator[RenderableType]:
    rows = [
        (name, f"{one.count:,}", f"{one.total / one.count:.4f}", f"{one.low:.4f}", f"{one.high:.4f}")
        for name, one in rewards.items()
    ]
    if rows:
        yield _table(["reward", "rollouts", "mean", "min", "max"], rows)


def overview_tables(overview: Overview, states: Mapping[State, int], tokens: TokenCounts) -> RenderableType:
    """Return the overview as tables. ``states`` and ``tokens`` are the ledger's counts, which outlive the groups' rows."""
    return Rows(
        *_counts("state", ((state.value, count) for state, count in states.items())),
        *_counts("last cause", ((cause.value, count) for cause, count in overview.causes.most_common())),
        *_counts("attempts", ((str(number), count) for number, count in sorted(overview.attempts.items()))),
        *_counts("weight version", ((_span(key), count) for key, count in sorted(overview.versions.items()))),
        *_tokens(tokens),
        *_rewards(overview.rewards.by_name),
    )


def tries(summary: GroupSummary) -> str:
    """Return the number of attempts as text: a finished group has its last attempt's number, others count failures."""
    number = max(summary.attempt, summary.attempts)
    return number_of(number, "attempt") if number else "not tried yet"


def summary_line(summary: GroupSummary) -> str:
    """Return a group as one line: id, state and step, attempts, cause, versions, rewards, tokens, last error."""
    step = "" if summary.step is None else f" (step {summary.step})"
    parts = [str(summary.id), summary.state.value + step, tries(summary)]
    parts += _samples(summary)
    if summary.cause is not None:
        parts.append(f"last cause {summary.cause.value}")
    if summary.reason is not None:
        parts.append(summary.reason)
    if summary.newest_version is not None:
        parts.append(f"versions {summary.oldest_version}-{summary.newest_version}")
    if summary.rewards:
        parts.append(f"rewards {'; '.join(map(reward_text, summary.rewards))}")
    if summary.tokens:
        parts.append(number_of(summary.tokens, "token"))
    if lost := by_cause(summary.wasted):
        parts.append(f"tokens wasted: {lost}")
    if summary.error is not None:
        parts.append(error_line(summary.error))
    return "  ".join(parts)


def _samples(summary: GroupSummary) -> Iterator[str]:
    """Yield what there is of samples whose group is not finished."""
    if summary.kept:
        yield number_of(summary.kept, "finished sample")
    if summary.unscored:
        yield f"{number_of(summary.unscored, 'sample')} without a reward"
    if summary.turns:
        yield number_of(summary.turns, "recorded turn")


def reward_text(reward: float | Mapping[str, float] | None) -> str:
    """Return a reward as one line."""
    if isinstance(reward, Mapping):
        return ", ".join(f"{name} {value:g}" for name, value in reward.items())
    return "none" if reward is None else f"{reward:g}"


def group_lines(
    summary: GroupSummary, body: Group | Prompt | None, samples: GroupSamples, *, decode: Decode | None = None
) -> Iterator[str]:
    """Yield the lines of a group; ``body`` is the one in the ledger, ``samples`` are those beside the body.

    ``decode`` returns the text of token ids; without it only the last answer of each row is there as text.
    """
    yield summary_line(summary)
    if body is None:
        yield _without_body(summary)
        return
    yield "--- prompt"
    yield from _prompt(body.prompt if isinstance(body, Group) else body)
    trajectories = body.trajectories if isinstance(body, Group) else (*samples.kept, *samples.unscored)
    for trajectory in sorted(trajectories, key=lambda row: row.index):
        yield from _trajectory(trajectory, decode)
    if summary.error is not None:
        yield from _failure(summary.error)


def _without_body(summary: GroupSummary) -> str:
    if summary.state is State.ACKED:
        return (
            f"(it was delivered as step {summary.step} and acked; its prompt and its trajectories were deleted then, because "
            "the ledger was not opened with keep_acked=True)"
        )
    return f"(it is {summary.state.value}; its prompt and its trajectories are not kept)"


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


def _segment(segment: Segment, decode: Decode | None) -> Iterator[str]:
    versions = ", ".join(f"{span.version} [{span.start}:{span.stop}]" for span in segment.versions) or "none"
    prompt_length = len(segment.tokens) - segment.response_length
    yield f"  {prompt_length} + {segment.response_length} tokens, versions {versions}"
    response = segment.tokens[prompt_length:].tolist()
    if decode is not None:
        yield from _parts(segment, decode)
        return
    if between := int((segment.loss_mask == 0).sum()):
        yield f"  ({between} tokens between the answers, such as a tool's: --tokenizer PATH shows them as text)"
    yield segment.text or (_ids(response) if response else "(no tokens)")


def _parts(segment: Segment, decode: Decode) -> Iterator[str]:
    """Yield the whole row as text: the context that the model saw, with the output of tools, and what it answered."""
    prompt_length = len(segment.tokens) - segment.response_length
    sampled = [False] * prompt_length + [bool(mask) for mask in segment.loss_mask]
    for is_answer, part in groupby(range(len(segment.tokens)), key=sampled.__getitem__):
        yield f"  [{'model' if is_answer else 'context'}]"
        yield decode([int(segment.tokens[place]) for place in part])


def _trajectory(trajectory: Trajectory, decode: Decode | None) -> Iterator[str]:
    yield (
        f"--- rollout {trajectory.index}: {trajectory.status.value}, stop {trajectory.stop.value}, "
        f"{number_of(trajectory.turns, 'turn')}, reward {reward_text(trajectory.reward)}"
    )
    for segment in trajectory.segments:
        yield from _segment(segment, decode)
    if trajectory.error is not None:
        yield from _failure(trajectory.error)


def _failure(failure: Failure) -> Iterator[str]:
    yield f"last error: {failure}"
    if failure.traceback:
        yield failure.traceback.rstrip()
