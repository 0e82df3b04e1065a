"""``trio-rollout rescore``: new rewards for the groups in a folder of results, without sampling.

The pass itself is ``trio_rollout.rescore``; here are its options, its signals and its summary. A signal cancels it: what is
written stays written, and the same command goes on.
"""

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click
import trio
from rich.console import Console
from rich.table import Table

from .. import RescoredGroup, RescoreReport, rescore
from .._core.ledger_events import RunIdentity
from .._core.lifecycle import State
from .._core.settings import Deadlines, EngineSettings, Retry
from .._core.values import Failure
from .._util.time import wait_s
from ..abc import Reward
from ..errors import LedgerError, SourceError
from ..ledger import RESCORED_STATES, open_ledger, read_ledger
from ..sources import TaskSource
from ._display import Screen, open_display, printable
from ._job import TASKS_OWN, resolve_reward
from ._options import COUNT, option
from ._outcome import RewardTally, error_line, number_of
from ._status import ExitStatus

_ENGINE, _DEADLINES, _RETRY = EngineSettings(), Deadlines(), Retry()
_MOST_IDS = 8
"""Groups that are named of those that failed alike."""
_NOTE_EVERY_S = 10.0
_EPILOG = """\b
Exit status: 0 every group is scored, 1 it failed, 2 wrong usage, 3 a scorer failed for some groups (they are listed),
130 ended by Ctrl-C or SIGTERM; the same command goes on.
"""


@attrs.frozen(kw_only=True)
class RescoreOptions:
    """The values of the options."""

    directory: Path
    reward: str | None
    state: tuple[str, ...]
    again: bool
    reward_deadline: float
    max_attempts: int
    max_running: int
    quiet: bool


@click.command("rescore", short_help="Score stored groups again, without sampling.", epilog=_EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@option(
    "--reward",
    "Score of a rollout, as of run: exact_match, regex:PATTERN or module:function. Default: the folder's own reward.",
    metavar="NAME",
)
@option(
    "--state",
    "Score only groups in this state; may be repeated. Needs the folder's own reward. Default: all.",
    multiple=True,
    type=click.Choice([state.value for state in RESCORED_STATES]),
)
@option("--again", "Begin anew, although the same command was interrupted before.", is_flag=True)
@option(
    "--reward-deadline",
    "Time limit for scoring one rollout; 0: no limit.",
    type=click.FloatRange(min=0),
    default=_DEADLINES.reward,
    metavar="SECONDS",
)
@option("--max-attempts", "Most tries at scoring one rollout.", type=COUNT, default=_RETRY.max_attempts)
@option("--max-running", "Most rollouts that are scored at once.", type=COUNT, default=_ENGINE.max_running)
@option("--quiet", "Print only errors and the groups that were not scored.", is_flag=True)
@click.pass_context
def rescore_command(context: click.Context, /, **options: Any) -> None:
    """Write new rewards for the groups in a folder of results. Nothing is sampled.

    Finished groups and the finished samples of others get new rewards. A quarantined group of which only scores were missing
    becomes ready, and the next run has it; no group is delivered again. Each group is written on its own, so the command may
    be interrupted or killed: run again, it goes on.
    """
    context.exit(_execute(RescoreOptions(**options)))


def _execute(options: RescoreOptions) -> ExitStatus:
    with read_ledger(options.directory) as reader:
        identity = reader.identity()
    if identity is None:
        raise LedgerError(f"ledger {options.directory} is empty: no run has begun, so there is nothing to score")
    name, reward = _reward_of(options, identity)
    console = Console()
    seen = _Seen()
    with open_display(console, title="", progress=False, plain_every_s=_NOTE_EVERY_S) as display:
        job = partial(_run, options, name, reward, seen, screen=None if options.quiet else Screen(display))
        report = trio.run(job, strict_exception_groups=True)
    if not options.quiet:
        console.print(_summary(options.directory, seen, report))
    for line in _closing_lines(seen, report):
        click.echo(printable(line))
    if report is None:
        return ExitStatus.INTERRUPTED
    return ExitStatus.QUARANTINED if seen.failed else ExitStatus.SCORED


def _reward_of(options: RescoreOptions, identity: RunIdentity) -> tuple[str, Reward]:
    """Return the reward's name, by default that of the folder, and the scorer.

    Raises:
      click.UsageError: neither the command nor the folder names a reward, or the name is unusable.
    """
    name = options.reward or identity.settings.get("reward")
    if name is None:
        raise click.UsageError(f"{options.directory} names no reward: give --reward")
    if name != TASKS_OWN:
        return name, resolve_reward(name)
    try:
        return name, TaskSource.of_identity(identity.source).reward
    except SourceError as error:
        raise click.UsageError(f"--reward {name!r}: {error}") from error


@attrs.define(eq=False)
class _Seen:
    """The groups that were scored so far."""

    groups: int = 0
    scored: int = 0
    ready: int = 0
    tally: RewardTally = attrs.field(factory=RewardTally)
    failed: list[RescoredGroup] = attrs.field(factory=list)

    def add(self, group: RescoredGroup) -> None:
        """Count a group."""
        self.groups += 1
        self.scored += group.error is None
        self.ready += group.before is State.QUARANTINED and group.after is State.READY
        for trajectory in group.trajectories:
            self.tally.add_reward(trajectory.reward)
        if group.error is not None:
            self.failed.append(attrs.evolve(group, trajectories=()))


async def _run(
    options: RescoreOptions, name: str, reward: Reward, seen: _Seen, *, screen: Screen | None
) -> RescoreReport | None:
    """Run the pass. Return its report; None if a signal came."""
    settings = attrs.evolve(
        _ENGINE,
        samples_per_prompt=1,
        max_running=options.max_running,
        deadlines=attrs.evolve(_DEADLINES, reward=options.reward_deadline),
        retry=attrs.evolve(_RETRY, max_attempts=options.max_attempts),
    )
    report: RescoreReport | None = None
    async with open_ledger(options.directory, keep_acked=True) as ledger, trio.open_nursery() as nursery:
        await nursery.start(_cancel_on_signal, nursery.cancel_scope)
        if screen is not None:
            nursery.start_soon(_show_progress, seen, screen)
        report = await rescore(
            ledger,
            reward,
            name=name,
            states=tuple(map(State, options.state)) or RESCORED_STATES,
            again=options.again,
            settings=settings,
            tell=seen.add,
        )
        nursery.cancel_scope.cancel("every group was scored")
    return report


async def _cancel_on_signal(
    scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Cancel at the first SIGINT or SIGTERM; a second one meets Python's own handlers."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
    scope.cancel("a signal came")


async def _show_progress(seen: _Seen, screen: Screen) -> None:
    while True:
        await wait_s(_NOTE_EVERY_S)
        await screen.say(f"{number_of(seen.groups, 'group')} done")


def _summary(directory: Path, seen: _Seen, report: RescoreReport | None) -> Table:
    """Return the table at the end."""
    table = Table(
        title=f"{directory}: {'scored again' if report else 'interrupted'}", show_header=False, title_justify="left"
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in _rows(seen, report):
        table.add_row(name, value)
    return table


def _rows(seen: _Seen, report: RescoreReport | None) -> Iterator[tuple[str, str]]:
    yield "groups scored", str(seen.scored)
    yield "now ready", str(seen.ready)
    yield "groups failed", str(len(seen.failed))
    for name, spread in seen.tally.by_name.items():
        yield f"mean {name}", f"{spread.total / spread.count:.4f}"
    if report is not None:
        if report.unfinished:
            yield "scored, but samples are missing", str(report.unfinished)
        for reason, count in report.skipped.items():
            if count:
                yield f"skipped: {reason}", str(count)


def _closing_lines(seen: _Seen, report: RescoreReport | None) -> Iterator[str]:
    """Yield a line for each kind of failure, and how to go on."""
    yield from failure_lines([(f"{group.id} ({group.after.value})", group.error) for group in seen.failed])
    if report is None:
        yield "interrupted: run the same command again to go on with the other groups"
    elif any(group.after not in {State.WAITING, State.QUARANTINED} for group in report.failed):
        yield (
            "finished groups that failed keep the rewards that they had. Mend the reward and run the same command again: it "
            "scores only those. Until then the folder is refused to runs"
        )


def failure_lines(failed: Sequence[tuple[str, Failure | None]]) -> Iterator[str]:
    """Yield one line for each kind of failure, the most frequent first, with the first groups that it met."""
    kinds = Counter(error_line(error) for _, error in failed if error is not None)
    for kind, count in kinds.most_common():
        names = [name for name, error in failed if error is not None and error_line(error) == kind]
        more = f" and {count - _MOST_IDS} more" if count > _MOST_IDS else ""
        yield f"failed for {number_of(count, 'group')}: {kind}: {', '.join(names[:_MOST_IDS])}{more}"
