"""``trio-rollout run``: the options in, a run, an exit status out."""

from functools import partial
from typing import Any

import click
import trio
from rich.console import Console

from ._display import Screen, open_display
from ._group_view import printable
from ._job import job_of
from ._options import RunOptions, config_option, run_options
from ._outcome import ExitStatus, Outcome, closing_lines, exit_status, summary
from ._run import run_job

_EPILOG = """\b
Exit status: 0 every group is scored; 1 the run failed; 2 wrong usage; 3 some groups were given up (they are
listed); 130 ended by Ctrl-C. SIGUSR1 shows what every task is doing.
"""


def _report(console: Console, outcome: Outcome, *, quiet: bool) -> None:
    if not quiet:
        console.print(summary(outcome))
    for line in closing_lines(outcome):
        click.echo(printable(line))


def execute(options: RunOptions) -> ExitStatus:
    """Run what the options say and print what came of it.

    Raises:
      RolloutError: the run failed; what it did until then has been printed.
      click.UsageError: the options contradict each other or name something that is not there.

    """
    job = job_of(options)
    console = Console()
    progress = not (options.quiet or options.no_progress)
    with open_display(
        console, title=str(options.out), progress=progress, plain_every_s=options.progress_every
    ) as display:
        outcome = trio.run(partial(run_job, job, screen=Screen(display)), strict_exception_groups=True)
    _report(console, outcome, quiet=options.quiet)
    if outcome.error is not None:
        raise outcome.error
    return exit_status(outcome)


@click.command("run", epilog=_EPILOG)
@config_option
@run_options
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Produce every group of a prompt file, scored, in a folder.

    Each prompt gets --samples rollouts; they are its group. Finished groups are written to --out as they come, and a second
    run with the same folder makes only what is missing. Read them with "export" and "inspect".
    """
    context.exit(execute(RunOptions(**options)))
