"""What signals do to a run: the first SIGINT or SIGTERM drains, the second cancels, SIGUSR1 shows the task tree.

While a watcher listens, Python's own KeyboardInterrupt is off: nothing is interrupted between two of its steps. Once the
second signal has been seen the old handlers are back, so a third one ends a run whose wrap-up hangs.

One run on the command line: servers, ledger and engine around a loop that takes and acks every finished group.

Its tasks live in one nursery inside the engine: the loop, the progress display, and the watchers of signals. The loop's end
is the run's end.
"""

import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import trio

from .. import RolloutEngine, open_rollout_engine
from .._util.service import open_service
from .._util.time import wait_s
from ..errors import EndOfData, EngineClosed
from ..ledger import open_ledger
from ..observe import task_tree
from ..sglang import SGLangServers
from ._display import Meter, Screen
from ._job import Job, checked_total, open_servers
from ._outcome import Ending, Outcome, RewardTally

Say = Callable[[str], Awaitable[None]]


async def stop_on_interrupt(
    drain: Callable[[], Awaitable[None]],
    cancel: Callable[[], None],
    *,
    say: Say,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Wait for an interrupt, then drain; at the next one, cancel. Runs until then or until it is cancelled.

    ``drain`` is awaited in a child: a second interrupt does not have to wait for it.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, "draining: no new groups; the running ones may finish. Ctrl-C again cancels them")
            nursery.start_soon(drain)
            await anext(signals)
            nursery.start_soon(say, "cancelling the running groups")
            cancel()


def open_tree_on_usr1(tree: Callable[[], str], *, say: Say) -> AbstractAsyncContextManager[None]:
    """Say what every task is doing each time SIGUSR1 comes: while the body runs, and while it is left."""

    async def show(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            task_status.started()
            async for _ in signals:
                await say(tree())

    return open_service(show)


MAX_BATCH = 64
"""Most groups that are acked in one write."""


@attrs.frozen(kw_only=True, eq=False)
class _Run:
    """What the tasks of one run share."""

    engine: RolloutEngine
    servers: SGLangServers
    meter: Meter
    screen: Screen
    tally: RewardTally = attrs.field(factory=RewardTally)

    async def show_progress(self) -> None:
        """Show the progress at the display's own pace, until cancelled."""
        while True:
            now = trio.current_time()
            counts, servers = self.engine.statistics(), self.servers.statistics().servers
            progress = self.meter.progress(counts, now=now, rewards=self.tally.means(), servers=servers)
            await self.screen.show(progress)
            await wait_s(self.screen.every_s)

    async def consume(self) -> Ending:
        """Take and ack groups until there are no more."""
        while True:
            await trio.lowlevel.checkpoint()
            ready = self.engine.statistics().ready  # never wait for more than is there: a group is safe once acked
            try:
                batch = await self.engine.next_batch(max(1, min(MAX_BATCH, ready)))
            except EndOfData:
                return Ending.FINISHED
            except EngineClosed:
                return Ending.DRAINED
            await batch.ack()
            self.tally.add(batch.groups)

    def outcome(self, *, ending: Ending, error: Exception | None, elapsed_s: float, out: Path) -> Outcome:
        """What is left of the run, once the engine has been left."""
        counts = self.engine.statistics()
        return Outcome(
            ending=ending,
            error=error,
            statistics=counts,
            quarantined=tuple(self.engine.quarantined()),
            total=self.meter.total,
            rollouts=self.tally.rollouts,
            tokens=counts.generated_tokens,
            rewards=self.tally.means(),
            elapsed_s=elapsed_s,
            out=out,
        )


async def _until_the_end(run: _Run, *, grace: float, cancel: Callable[[], None]) -> Ending:
    """The loop, with the display and the watcher of interrupts beside it."""
    async with trio.open_nursery() as nursery:
        drain = partial(run.engine.drain, grace=grace)
        await nursery.start(partial(stop_on_interrupt, drain, cancel, say=run.screen.say))
        nursery.start_soon(run.show_progress)
        ending = await run.consume()
        nursery.cancel_scope.cancel("the run is over")
    return ending


@asynccontextmanager
async def _open_engine(job: Job, *, say: Say) -> AsyncGenerator[tuple[RolloutEngine, SGLangServers]]:
    """The engine and its servers, inside all that they need."""
    async with (
        open_tree_on_usr1(task_tree, say=say),
        open_servers(job.servers, say=say) as servers,
        open_ledger(job.out, keep_acked=True, settings=job.same) as ledger,
        open_rollout_engine(
            job.source, job.generate, servers=servers, reward=job.reward, ledger=ledger, settings=job.settings
        ) as engine,
    ):
        yield engine, servers


async def run_job(job: Job, *, screen: Screen) -> Outcome:
    """Produce every group of the source, scored, in the ledger; what it has already is not made again.

    Blocks until the source has ended or an interrupt has drained the engine. Cancelled, the running groups are cancelled
    and stay to be done in the ledger.

    Raises:
      RolloutError: nothing could begin: the prompts, the servers or the ledger are unusable. A failure after that is in the
        outcome.

    """
    begun = trio.current_time()
    total = await checked_total(job.source, tokenizer=job.servers.tokenizer)
    run: _Run | None = None
    ending, error = Ending.CANCELLED, None
    # Around everything: only a body that is left by Cancelled makes the engine leave without a grace.
    with trio.CancelScope() as everything:  # noqa: ASYNC912  opening the servers is a checkpoint
        try:
            async with _open_engine(job, say=screen.say) as (engine, servers):
                run = _Run(engine=engine, servers=servers, meter=Meter(total=total), screen=screen)
                ending = await _until_the_end(run, grace=job.grace, cancel=everything.cancel)
        except Exception as failure:
            if run is None:  # nothing has begun, so there is nothing to report but this
                raise
            ending, error = Ending.FAILED, failure
    if run is None:
        raise AssertionError("only a run that has begun is cancelled in silence")
    return run.outcome(ending=ending, error=error, elapsed_s=trio.current_time() - begun, out=job.out)
