"""Putting an engine together: its parts, wired, with what the ledger remembers.

The rollout engine: wires source, pool, delivery and weights; the only file that knows them all.
"""

import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Self, final

import attrs
import trio

from .._core.batching import Answer, Supply, decide
from .._core.book import Book, Entry
from .._core.checks import is_whole
from .._core.enums import Cause, PauseMode
from .._core.events import Recovered, RunIdentity
from .._core.failures import FailureBudget
from .._core.lifecycle import State
from .._core.settings import EngineSettings
from .._core.statistics import EngineStatistics, ServerStatistics
from .._core.values import Group, GroupId, QuarantineReport
from .._util.condition import Condition
from .._util.exception_groups import is_cancellation
from .._util.ports import Ports
from .._util.service import open_service
from ..abc import Gateway, Generate, GroupFilter, GroupReward, InferenceServers, Instrument, Ledger, Reward, Source
from ..errors import EndOfData, EngineClosed
from ..observe import task_tree
from ..tools import new_rollout_tools
from ._context import RolloutContext
from ._delivery import Batch, Delivery
from ._evaluation import Evaluation, evaluation_context
from ._gate import Gate
from ._instruments import Instruments
from ._pool import Pool
from ._ready import ReadyBuffer
from ._running import RunningAttempts
from ._slots import Slots
from ._staleness import StalenessPolicy
from ._state import EngineFailure, LedgerWriter
from ._weights import Weights, WeightUpdate


@attrs.frozen(eq=False)
class Parts:
    """Everything an engine is made of."""

    context: RolloutContext
    book: Book
    delivery: Delivery
    pool: Pool
    weights: Weights
    record: LedgerWriter
    fate: EngineFailure
    slots: Slots


async def assemble(
    source: Source, context: RolloutContext, ledger: Ledger | None, instruments: Sequence[Instrument]
) -> Parts:
    """Wire an engine's parts and restore them to where the ledger's last run was. Starts nothing.

    A source that can check its prompts (``check()``) does so before anything else: bad input must not cost a run's work.
    """
    check = getattr(source, "check", None)
    if check is not None:
        await check()
    past = Recovered() if ledger is None else await ledger.begin(_identity(source, context.settings))
    parts = _wire(source, context, ledger, Instruments(instruments))
    if past.source_state is not None:
        source.restore(past.source_state)
    _remember(parts, past)
    named = [version for version in (await context.servers.versions()).values() if version is not None]
    context.gate.version = max(named, default=0) if past.weight_version is None else past.weight_version
    context.servers.require_version(context.gate.version)
    return parts


def _wire(source: Source, context: RolloutContext, ledger: Ledger | None, instruments: Instruments) -> Parts:
    changed, came, settings = Condition(), Condition(), context.settings
    fate, book, live, queue = EngineFailure(came), Book(), RunningAttempts(), deque[Entry]()
    record = LedgerWriter(ledger, fate)
    freshness = StalenessPolicy(
        staleness=settings.staleness, gate=context.gate, live=live, instruments=instruments, came=came
    )
    ready = ReadyBuffer(book=book, max_ready=settings.max_ready, came=came, changed=changed, due=freshness.due)
    slots = Slots(settings.max_running, changed)
    pool = Pool(
        source=source,
        context=context,
        book=book,
        ready=ready,
        record=record,
        fate=fate,
        live=live,
        slots=slots,
        changed=changed,
        instruments=instruments,
        budget=FailureBudget(settings.failure_budget),
        freshness=freshness,
        queue=queue,
    )
    new_id = context.ports.new_rid
    delivery = Delivery(
        book=book, ready=ready, record=record, fate=fate, freshness=freshness, queue=queue, new_id=new_id
    )
    weights = _weights(pool)
    return Parts(context, book, delivery, pool, weights, record, fate, slots)


def _weights(pool: Pool) -> Weights:
    return Weights(
        context=pool.context,
        live=pool.live,
        evaluations=RunningAttempts(),
        record=pool.record,
        fate=pool.fate,
        changed=pool.changed,
        freshness=pool.freshness,
        instruments=pool.instruments,
    )


def _remember(parts: Parts, past: Recovered) -> None:
    book = parts.book
    book.count_earlier(acked=past.acked, filtered=past.filtered, reports=past.quarantined)
    parts.pool.remember([
        book.enter(
            Entry(
                id=item.prompt.group_id,
                prompt=item.prompt,
                attempt=item.attempt,
                attempts=item.attempts,
                unpenalized=item.unpenalized,
            )
        )
        for item in past.unfinished
    ])
    handed_out = [book.enter(_ready_entry(group)) for _, groups in past.delivered for group in groups]
    fresh = [book.enter(_ready_entry(group)) for group in past.ready]
    parts.delivery.remember(handed_out, fresh, acked_step=past.acked_step)
    parts.delivery.next_step = past.next_step


def _ready_entry(group: Group) -> Entry:
    return Entry(id=group.id, prompt=group.prompt, state=State.READY, attempt=group.attempt, group=group)


def _identity(source: Source, settings: EngineSettings) -> RunIdentity:
    """A source names itself by an attribute ``identity``; one without is known by its type."""
    name = getattr(source, "identity", None)
    text = str(name) if name is not None else f"{type(source).__module__}.{type(source).__qualname__}"
    return RunIdentity(source=text, samples_per_prompt=settings.samples_per_prompt)


_LOGGER = logging.getLogger("trio_rollout")


@final
@attrs.define(eq=False, repr=False)
class RolloutEngine:
    """A running engine; ``open_rollout_engine`` makes one. Its tasks run until the ``async with`` block is left."""

    _parts: Parts
    _before: ServerStatistics
    _evaluation_slots: Slots
    _closed: bool = attrs.field(default=False, init=False)

    async def next_batch(self, size: int) -> Batch:
        """Wait for ``size`` finished groups and take them.

        Blocks until they are there; at the end of data the last batch may be smaller. Waiters are served first come,
        first served. Cancelled, it has taken nothing: every group is ready again. A size above ``max_ready`` raises the
        buffer's bound for this call.

        Raises:
          EndOfData: every group was delivered, filtered or quarantined.
          EngineClosed: the engine was drained and nothing is left, or its block was left.
          RuntimeError: it would have to wait inside its caller's own ``weight_update``.
          ServerError: it would have to wait for a weight update: no server that answers has the current weights.
          Exception: the engine's own failure (SourceError, LedgerError, an exhausted failure budget), at once.
        """
        if not is_whole(size, 1):
            raise ValueError(f"next_batch: size must be an integer >= 1, got {size!r}")
        self._refuse_if_closed("next_batch")
        if decide(size, self._supply()).answer is Answer.WAIT:
            self._refuse_inside_window("next_batch")
        return await self._parts.delivery.next_batch(size, self._supply, self.statistics)

    def batches(self, size: int) -> "Batches":
        """Batches of ``size`` groups, until the data ends or the engine is drained."""
        return Batches(self, size)

    def weight_update(
        self, *, version: int, mode: PauseMode = PauseMode.ABORT
    ) -> AbstractAsyncContextManager[WeightUpdate]:
        """Open a window in which every server is paused, so that the body can give them new weights.

        Entering blocks until every server is paused and, with ABORT, quiet. The body runs with nothing sampling. Leaving
        reads the servers' versions, resumes them whatever was raised, and lets requests through again. Cancelled, the
        version stays and the servers are resumed all the same.

        Raises:
          ValueError: the version is not above the current one.
          trio.BusyResourceError: another window is open.
          ServerError: a server could not be paused (the body does not run), or names another version afterwards.
        """
        self._refuse_if_closed("weight_update")
        return self._parts.weights.update(version, mode)

    async def note_weight_version(self, version: int) -> None:
        """Say that the servers have these weights now, where somebody else updates them, without a ``weight_update``.

        Staleness is counted from it; the host's word is taken, and no server is asked. Blocks until the ledger has it.

        Raises:
          trio.BusyResourceError: a weight update is under way.
        """
        self._refuse_if_closed("note_weight_version")
        await self._parts.weights.note(version)

    async def drain(self, grace: float | None = None) -> None:
        """Stop admitting, let running groups finish for ``grace`` seconds, cancel the rest, wait for their wrap-up.

        Waiting and cancelled groups are given back to the source, or stay in the ledger. Ready groups stay deliverable;
        afterwards ``next_batch`` raises EngineClosed. Without ``grace`` it is ``Deadlines.drain`` less ``abort``.
        Cancelled, admission stays closed, what runs may finish, and the rest happens on leaving.

        Raises:
          RuntimeError: it was called inside the caller's own ``weight_update``.
        """
        self._refuse_inside_window("drain")
        deadlines = self._parts.context.settings.deadlines
        await self._parts.pool.drain(deadlines.drain - deadlines.abort if grace is None else grace)

    async def evaluate(
        self, source: Source, generate: Generate | None = None, samples_per_prompt: int = 1
    ) -> tuple[Group, ...]:
        """Run every prompt of ``source`` once and return its groups, in the source's order.

        Blocks until all are done; production goes on beside it and its counts stay as they are. A weight update restarts
        what it interrupts. A prompt that failed for good is a group of FAILED trajectories. Cancelled, its rollouts are
        aborted on their servers.

        Raises:
          RuntimeError: it was called inside the caller's own ``weight_update``.
          Exception: the engine's own failure, or whatever the source raised.
        """
        self._refuse_if_closed("evaluate")
        self._refuse_inside_window("evaluate")
        parts = self._parts
        parts.fate.check()
        evaluation = Evaluation(
            context=evaluation_context(parts.context, generate, samples_per_prompt),
            fate=parts.fate,
            live=parts.weights.evaluations,
            slots=self._evaluation_slots,
            samples=samples_per_prompt,
        )
        return await evaluation.run(source)

    async def restore(self, step: int) -> None:
        """Offer again every batch delivered after ``step`` and not acked: for a trainer that went back to that checkpoint.

        Blocks until the ledger has it. The next weight update may then name a version that is not above the current one.

        Raises:
          RolloutError: a later batch was acked.
        """
        await self._parts.delivery.restore(step)
        self._parts.weights.may_repeat = True

    @property
    def weight_version(self) -> int:
        """The newest weight version."""
        return self._parts.context.gate.version

    def statistics(self) -> EngineStatistics:
        """Counts of this moment."""
        parts, book = self._parts, self._parts.book
        servers = parts.context.servers.statistics()
        return EngineStatistics(
            pulled=book.pulled,
            waiting=book.count(State.WAITING),
            running=book.count(State.RUNNING),
            ready=book.count(State.READY),
            delivered=book.count(State.DELIVERED),
            acked=book.count(State.ACKED),
            filtered=book.count(State.FILTERED),
            quarantined=book.count(State.QUARANTINED),
            returned=book.count(State.RETURNED),
            requeues=book.requeues,
            late=servers.late - self._before.late,
            orphans=servers.orphans - self._before.orphans,
            running_rollouts=parts.slots.in_use,
            max_running=parts.slots.total,
            generated_tokens=parts.pool.generated_tokens,
            weight_version=self.weight_version,
        )

    def ready_ids(self) -> Sequence[GroupId]:
        """Return the ids of the groups that are ready, as they came: finished, and not handed out or handed back."""
        return tuple(entry.id for entry in self._parts.delivery.ready.entries)

    def quarantined(self) -> Sequence[QuarantineReport]:
        """What was given up: id, cause, attempts and last error of each."""
        return self._parts.book.reports

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<RolloutEngine {now.running} groups running ({now.running_rollouts} rollouts), {now.waiting} waiting, "
            f"{now.ready} ready, {now.delivered} delivered | weights {now.weight_version}>"
        )

    def _supply(self) -> Supply:
        parts = self._parts
        return Supply(
            ready=len(parts.delivery.ready),
            unfinished=parts.book.count(State.WAITING) + parts.book.count(State.RUNNING),
            exhausted=parts.pool.exhausted,
            drained=parts.pool.is_over,
            failed=parts.fate.error is not None,
            failure_told=parts.fate.told,
            due=parts.weights.freshness.due(),
            blocked=parts.fate.obstacle is not None,
        )

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise EngineClosed(f"{what}: the engine's block was left")

    def _refuse_inside_window(self, what: str) -> None:
        if self._parts.weights.is_inside():
            raise RuntimeError(
                f"{what}: it would wait for rollouts that cannot run before this weight_update block is left"
            )

    async def _leave(self, _: None, error: BaseException | None) -> None:
        """Drain within ``Deadlines.drain``: with no grace when the body failed, or when nobody can get the results."""
        deadlines = self._parts.context.settings.deadlines
        grace = deadlines.drain - deadlines.abort if error is None and self._parts.record.ledger is not None else 0.0
        self._parts.fate.close()
        with trio.move_on_after(deadlines.drain):
            await self._parts.pool.drain(grace, Cause.CANCELLED if is_cancellation(error) else Cause.SHUTDOWN)
            await self._parts.pool.give_back(self._parts.delivery.give_up_ready())
            evaluations = self._parts.weights.evaluations
            await evaluations.changed.wait_until(lambda: not len(evaluations))
        self._closed = True


@final
@attrs.define(eq=False)
class Batches:
    """Asynchronous iterator over batches; stops at the end of data, or when the engine is drained."""

    _engine: RolloutEngine
    _size: int

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self._engine.next_batch(self._size)
        except (EndOfData, EngineClosed):
            raise StopAsyncIteration from None


@asynccontextmanager
async def open_rollout_engine(
    source: Source,
    generate: Generate,
    *,
    servers: InferenceServers,
    reward: Reward | None = None,
    group_reward: GroupReward | None = None,
    group_filter: GroupFilter | None = None,
    ledger: Ledger | None = None,
    settings: EngineSettings | None = None,
    instruments: Sequence[Instrument] = (),
    ports: Ports | None = None,
    gateway: Gateway | None = None,
) -> AsyncGenerator[RolloutEngine]:
    """Run rollouts of the source's prompts until the block is left; the unfinished goes back, or stays in the ledger.

    Entering reads versions and the ledger. Leaving takes at most ``Deadlines.drain`` plus one accepted write.

    Raises:
      Exception: the body's own as itself; the engine's own (LedgerError: the ledger is another run's) if no call told it.
    """
    settings, ports = settings or EngineSettings(), ports or Ports()
    context = RolloutContext(
        generate=generate,
        reward=reward,
        group_reward=group_reward,
        group_filter=group_filter,
        servers=servers.under(settings.deadlines),
        gate=Gate(),
        settings=settings,
        ports=ports,
        show_tasks=task_tree,
        new_tools=partial(new_rollout_tools, deadlines=settings.deadlines, ports=ports),
        gateway=gateway,
    )
    parts = await assemble(source, context, ledger, instruments)
    engine = RolloutEngine(parts, context.servers.statistics(), Slots(settings.max_running, Condition()))
    async with open_service(parts.pool.serve, engine._leave):
        yield engine
    parts.fate.check()
