"""``trio-rollout run``: servers, ledger and engine around a loop that takes and acks every finished group.

The tasks of a run live in one nursery inside the engine: the loop, the progress display, and the watcher of signals. The run
ends when the loop ends.

The first SIGINT or SIGTERM drains, the second cancels, SIGUSR1 prints the task tree. While a watcher listens, Python raises
no KeyboardInterrupt, so nothing is interrupted between two of its steps. After the second signal the old handlers are
back, so a third one ends a run whose cleanup hangs.
"""

import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import attrs
import trio

from .. import RolloutEngine, open_rollout_engine
from .._util.service import open_service
from .._util.time import wait_s
from ..engine._engine import identity_of
from ..errors import EndOfData, EngineClosed, RolloutError
from ..ledger import open_ledger
from ..ledger._disk import DATABASE
from ..observe import task_tree
from ..sglang import SGLangServers
from ._display import Display, Meter, Screen, open_display, open_output, printable
from ._job import Job, checked_total, job_of, open_servers
from ._options import RunOptions
from ._outcome import Ending, Outcome, RewardTally, closing_lines, exit_status, finished_before, summary
from ._status import ExitStatus

Say: TypeAlias = Callable[[str], Awaitable[None]]

MAX_BATCH = 64
"""Most groups that are acked in one write."""
_DRAINING = "draining: no new groups start, running groups may finish. A second Ctrl-C or SIGTERM cancels them"


def execute(options: RunOptions) -> ExitStatus:
    """Run the job that the options describe, and print its outcome.

    Raises:
      RolloutError: the run failed; its outcome has been printed, unless user code raised SystemExit past everything.
      click.UsageError: options contradict each other, or name something that does not exist.
    """
    job = job_of(options)
    progress = not (options.quiet or options.no_progress)
    with open_display(
        open_output(), title=str(options.out), progress=progress, plain_every_s=options.progress_every
    ) as display:
        try:
            outcome = trio.run(partial(run_job, job, screen=Screen(display)), strict_exception_groups=True)
        except SystemExit as error:  # only the summary says how a run ended: decision 0019
            raise RolloutError(f"the run was ended by SystemExit({error.code!r}), which user code raised") from error
    _report(display, outcome, quiet=options.quiet)
    if outcome.error is not None:
        raise outcome.error
    return exit_status(outcome)


def _report(display: Display, outcome: Outcome, *, quiet: bool) -> None:
    if not quiet:
        display.print(summary(outcome))
    for line in closing_lines(outcome):
        display.say(printable(line))


async def run_job(job: Job, *, screen: Screen) -> Outcome:
    """Sample and score every group of the source that the ledger does not have yet.

    Blocks until the source has ended or a signal has drained the engine. Cancelled, the running groups are cancelled; the
    ledger keeps them to be done.

    Raises:
      RolloutError: the run could not begin: the prompts, the servers or the ledger are unusable. A later failure is in the
        outcome.
    """
    begun = trio.current_time()
    total = await checked_total(job.source, tokenizer=job.options.tokenizer)
    if (finished := await _finished(job, total)) is not None:
        return finished
    run: _Run | None = None
    ending, error = Ending.CANCELLED, None
    # Around everything: the engine drains without a grace only if its body is left by Cancelled.
    with trio.CancelScope() as everything:
        try:
            async with _open_engine(job, say=screen.say) as (engine, servers):
                run = _Run(engine=engine, servers=servers, meter=Meter(total=total), screen=screen)
                ending = await _until_the_end(run, grace=job.options.grace, cancel=everything.cancel)
        except Exception as failure:
            if run is None:  # nothing has begun, so this error is all there is to report
                raise
            ending, error = Ending.FAILED, failure
    if run is None:
        raise AssertionError("only a run that has begun can be cancelled without an error")
    return run.outcome(ending=ending, error=error, elapsed_s=trio.current_time() - begun, out=job.options.out)


async def _finished(job: Job, total: int | None) -> Outcome | None:
    """Return the outcome of a run that has nothing left to do; None if there is something, or no ledger yet.

    So neither a finished run nor one with another run's ledger starts a model.
    """
    if total is None or not (job.options.out / DATABASE).exists():
        await trio.lowlevel.checkpoint()
        return None
    async with open_ledger(job.options.out, keep_acked=True, settings=job.identity) as ledger:
        past = await ledger.begin(identity_of(job.source, job.settings))
    again = sum(report.attempts > 0 for report in past.quarantined) if job.options.retry_quarantined else 0
    done = past.acked + past.filtered + len(past.quarantined) - again
    return None if done < total else finished_before(past, total=total, out=job.options.out)


@asynccontextmanager
async def _open_engine(job: Job, *, say: Say) -> AsyncGenerator[tuple[RolloutEngine, SGLangServers]]:
    """Open the engine and its servers, inside everything that they need."""
    async with (
        open_tree_on_usr1(task_tree, say=say),
        open_servers(job.options, say=say) as servers,
        open_ledger(
            job.options.out,
            keep_acked=True,
            settings=job.identity,
            retry_quarantined=job.options.retry_quarantined,
        ) as ledger,
        open_rollout_engine(
            job.source, job.generate, servers=servers, reward=job.reward, ledger=ledger, settings=job.settings
        ) as engine,
    ):
        yield engine, servers


async def _until_the_end(run: "_Run", *, grace: float, cancel: Callable[[], None]) -> Ending:
    """Run the loop, with the display and the watcher of signals beside it."""
    async with trio.open_nursery() as nursery:
        drain = partial(run.engine.drain, grace=grace)
        await nursery.start(partial(stop_on_interrupt, drain, cancel, say=run.screen.say))
        nursery.start_soon(run.show_progress)
        ending = await run.consume()
        nursery.cancel_scope.cancel("the run is over")
    return ending


@attrs.frozen(kw_only=True, eq=False)
class _Run:
    """The objects that the tasks of one run share, and the tasks."""

    engine: RolloutEngine
    servers: SGLangServers
    meter: Meter
    screen: Screen
    tally: RewardTally = attrs.field(factory=RewardTally)

    async def show_progress(self) -> None:
        """Show the progress at the display's interval, until cancelled."""
        while True:
            now = trio.current_time()
            counts, servers = self.engine.statistics(), self.servers.statistics().servers
            progress = self.meter.progress(counts, now=now, rewards=self.tally.means(), servers=servers)
            await self.screen.show(progress)
            await wait_s(self.screen.display.every_s)

    async def consume(self) -> Ending:
        """Take and ack groups until there are no more."""
        while True:
            await trio.lowlevel.checkpoint()
            # Never wait for more groups than are ready: a group is safe once acked.
            ready = self.engine.statistics().ready
            try:
                batch = await self.engine.next_batch(max(1, min(MAX_BATCH, ready)))
            except EndOfData:
                return Ending.FINISHED
            except EngineClosed:
                return Ending.DRAINED
            await batch.ack()
            self.tally.add(batch.groups)

    def outcome(self, *, ending: Ending, error: Exception | None, elapsed_s: float, out: Path) -> Outcome:
        """Return the outcome, once the engine has been left."""
        counts = self.engine.statistics()
        return Outcome(
            ending=ending,
            error=error,
            statistics=counts,
            quarantined=tuple(self.engine.quarantined()),
            total=self.meter.total,
            rollouts=counts.rollouts,
            scored=self.tally.rollouts,
            tokens=counts.generated_tokens,
            rewards=self.tally.means(),
            elapsed_s=elapsed_s,
            out=out,
        )


async def stop_on_interrupt(
    drain: Callable[[], Awaitable[None]],
    cancel: Callable[[], None],
    *,
    say: Say,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Drain at the first SIGINT or SIGTERM and cancel at the second. Runs until then, or until it is cancelled.

    ``drain`` runs in a child task, so that a second signal does not wait for it.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, _DRAINING)
            nursery.start_soon(drain)
            await anext(signals)
            nursery.start_soon(say, "cancelling the running groups")
            cancel()


def open_tree_on_usr1(tree: Callable[[], str], *, say: Say) -> AbstractAsyncContextManager[None]:
    """Print the tasks' await stacks at each SIGUSR1, while the body runs and while it is left."""

    async def show(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            task_status.started()
            async for _ in signals:
                await say(tree())

    return open_service(show)
