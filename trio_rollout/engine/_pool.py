"""Who runs: pulls prompts, admits groups while slots are unpenalized, settles each attempt exactly once, drains.

Owns the nursery of attempts and the queue of waiting groups. Requeued groups join the queue at its end: behind what was
waiting, before what was never pulled. Nothing here is polled: whoever frees a slot, requeues or opens the gate notifies.

Writing a pull down. Bad input must not cost a run's work: a prompt that can't be stored is given up, the others go on.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import final

import attrs
import trio

from .._core.admission import Load, may_pull, may_start, pullable, startable
from .._core.book import Book, Entry
from .._core.enums import Cause
from .._core.events import Filtered, Pulled, Quarantined, Ready, Requeued
from .._core.failures import Again, FailureBudget, after_failure, failure_of, words_of
from .._core.lifecycle import Event, State
from .._core.values import GroupId, Prompt, QuarantineReport
from .._util.condition import Condition
from .._util.time import retry_wait_s, wait_s
from ..abc import Source
from ..errors import DataRefused, LedgerError, RolloutError, SourceError
from ._attempt import Attempt, Dropped, Finished, Outcome, Unfinished, new_attempt
from ._context import RolloutContext
from ._group import run_attempt
from ._instruments import Instruments
from ._ready import ReadyBuffer
from ._running import RunningAttempts
from ._slots import SlotLease, Slots
from ._staleness import StalenessPolicy
from ._state import EngineFailure, LedgerWriter

_LOGGER = logging.getLogger("trio_rollout")
_AHEAD = 4
"""A quarter of what can run is pulled ahead: while a ledger writes a pull down, slots that become free do not wait for it."""


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Pool:
    """The running groups. ``changed`` is notified when a group might be started or pulled."""

    source: Source
    context: RolloutContext
    book: Book
    ready: ReadyBuffer
    record: LedgerWriter
    fate: EngineFailure
    live: RunningAttempts
    slots: Slots
    changed: Condition
    instruments: Instruments
    budget: FailureBudget
    freshness: StalenessPolicy
    queue: deque[Entry]
    exhausted: bool = False
    generated_tokens: int = attrs.field(default=0, init=False)
    _admission: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _giving_back: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    def remember(self, entries: Sequence[Entry]) -> None:
        """Queue groups that a ledger remembers as unfinished."""
        self.queue.extend(entries)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run until admission is closed by a drain and every attempt is over."""
        async with trio.open_nursery() as beside:
            beside.start_soon(self._note_obstacles, name="note obstacles")
            async with trio.open_nursery() as attempts:
                task_status.started()
                with self._admission:
                    async with trio.open_nursery() as admitting:
                        admitting.start_soon(self._pull, name="pull prompts")
                        admitting.start_soon(self._admit, attempts, name="admit groups")
            beside.cancel_scope.cancel(reason="every attempt is over")

    def load(self) -> Load:
        """What admission looks at now."""
        under_way = self.book.count(State.RUNNING)
        per_group = self.context.settings.samples_per_prompt
        return Load(
            open=self.context.gate.is_open and self.fate.error is None,
            free_slots=self.slots.free,
            per_group=per_group,
            eligible=len(self.queue),
            finished=len(self.ready) + under_way - self.slots.holders,
            bound=self.ready.bound,
            exhausted=self.exhausted,
            fresh_room=self.freshness.room(under_way + len(self.ready)),
            ahead=self._ahead(),
            resting=self.book.count(State.WAITING) - len(self.queue),
            most_resting=self.slots.total // per_group,
        )

    def _startable(self) -> int:
        per_group = self.context.settings.samples_per_prompt
        return startable(self.load()) if may_start(free_slots=self.slots.free, per_group=per_group) else 0

    def _pullable(self) -> int:
        unpenalized, per_group = self.slots.free, self.context.settings.samples_per_prompt
        might = may_pull(free_slots=unpenalized, per_group=per_group, eligible=len(self.queue), ahead=self._ahead())
        return pullable(self.load()) if might else 0

    def _ahead(self) -> int:
        return max(1, self.slots.total // self.context.settings.samples_per_prompt // _AHEAD)

    async def _note_obstacles(self) -> None:
        while True:
            self.fate.obstruct(await self.context.servers.blocked_reason_after(self.fate.obstacle))

    async def _pull(self) -> None:
        while not self.exhausted:
            count = await self.changed.wait_until(self._pullable)
            try:
                await self._pull_some(count)
            except Exception as error:  # noqa: BLE001  the boundary of the source: its failure becomes the engine's
                self.fate.fail(_source_failed(error))
                return

    async def _pull_some(self, count: int) -> None:
        prompts = await self.source.take(count)
        if len(prompts) > count or not all(isinstance(prompt, Prompt) for prompt in prompts):
            raise SourceError(f"source.take({count}) must give at most {count} prompts, got {prompts!r:.200}")
        self.exhausted = not prompts
        entries = [self.book.pull(prompt) for prompt in prompts]
        refused = await record_pull(self.record, prompts, self.source) if prompts else {}
        for entry in entries:
            if entry.id in refused:
                self._gave_up(entry, refused[entry.id])
            else:
                self.queue.append(entry)
        self.changed.notify()
        self.ready.came.notify()

    async def _admit(self, attempts: trio.Nursery) -> None:
        while True:
            for _ in range(await self.changed.wait_until(self._startable)):
                self._start(attempts)

    def _start(self, attempts: trio.Nursery) -> None:
        entry = self.queue.popleft()
        settings = self.context.settings
        self.book.start(entry)
        attempt = new_attempt(
            entry.prompt, entry.attempt, rollouts=settings.samples_per_prompt, seconds=settings.deadlines.group
        )
        lease = self.slots.claim(settings.samples_per_prompt)
        self.instruments.emit("group.started", id=entry.id, attempt=entry.attempt)
        attempts.start_soon(self._run, entry, attempt, lease, name=f"group {entry.id} attempt {entry.attempt}")

    async def _run(self, entry: Entry, attempt: Attempt, lease: SlotLease) -> None:
        with self.live.holding(attempt):
            with lease:
                outcome = await run_attempt(attempt, self.context, lease)
            self.generated_tokens += attempt.new_tokens
            try:
                backoff = await self._settle(entry, attempt, outcome)
            except LedgerError as error:  # on disk the group is unfinished, and it stays so here
                self.fate.fail(error)
                return
        self.ready.came.notify()
        self.changed.notify()
        if backoff is None:
            return
        await wait_s(backoff)
        self.queue.append(entry)
        self.changed.notify()

    async def _settle(self, entry: Entry, attempt: Attempt, outcome: Outcome) -> float | None:
        """LedgerWriter the outcome, then show it. Returns seconds until a requeued group may start; None for all others."""
        try:
            return await self._settle_as(outcome, entry, attempt)
        except DataRefused as error:  # user code put something into it that no other try would leave out
            failure = failure_of(error, group=entry.id, attempt=attempt.number)
            await self._give_up(entry, Unfinished(Cause.ERROR, failure, permanent=True))
            return None

    async def _settle_as(self, outcome: Outcome, entry: Entry, attempt: Attempt) -> float | None:
        match outcome:
            case Finished(group=group):
                await self.record.write(Ready(group=group))
                self.budget.group_ready()
                await self.ready.put(entry, group)
                self.instruments.emit("group.ready", id=entry.id, attempt=attempt.number, group=group)
            case Dropped(reason=reason):
                await self.record.write(Filtered(id=entry.id, attempt=attempt.number, reason=reason))
                self.budget.group_ready()
                self.book.apply(entry, Event.FILTER)
                self.instruments.emit("group.filtered", id=entry.id, attempt=attempt.number, reason=reason)
            case Unfinished():
                return await self._settle_unfinished(entry, attempt, outcome)
        return None

    async def _settle_unfinished(self, entry: Entry, attempt: Attempt, outcome: Unfinished) -> float | None:
        if outcome.cause in {Cause.SHUTDOWN, Cause.CANCELLED} and self.record.ledger is None:
            return None  # the drain that cancelled it gives it back to the source: no requeue
        retry = self.context.settings.retry
        verdict = after_failure(
            outcome.cause,
            permanent=outcome.permanent,
            attempts=entry.attempts,
            unpenalized=entry.unpenalized + attempt.empty_continuations,
            new_tokens=attempt.new_tokens,
            retry=retry,
        )
        if not isinstance(verdict, Again):
            await self._give_up(entry, outcome)
            return None
        await self.record.write(
            Requeued(
                id=entry.id,
                attempt=attempt.number,
                cause=outcome.cause,
                attempts=verdict.attempts,
                unpenalized=verdict.unpenalized,
                error=outcome.failure,
            )
        )
        self.book.requeue(entry, outcome.cause, attempts=verdict.attempts, unpenalized=verdict.unpenalized)
        if outcome.cause is Cause.ERROR:  # user code's, mostly: nobody should have to look for it
            _LOGGER.warning("group %s runs again, attempt %d failed: %s", entry.id, attempt.number, outcome.failure)
        self.instruments.emit(
            "group.requeued", id=entry.id, attempt=attempt.number, cause=outcome.cause, error=outcome.failure
        )
        return retry_wait_s(verdict.backoff, retry=retry, rng=self.context.ports.random)

    async def _give_up(self, entry: Entry, outcome: Unfinished) -> None:
        report = QuarantineReport(id=entry.id, cause=outcome.cause, attempts=entry.attempt, error=outcome.failure)
        await self.record.write(Quarantined(report=report))
        self._gave_up(entry, report)

    def _gave_up(self, entry: Entry, report: QuarantineReport) -> None:
        self.book.quarantine(entry, report)
        _LOGGER.error("group %s is quarantined at attempt %d: %s", entry.id, report.attempts, report.error)
        self.instruments.emit("group.quarantined", report=report)
        if self.budget.group_failed():
            self.fate.fail(
                RolloutError(
                    f"{self.budget.in_a_row} groups in a row failed for good and none became ready in between; "
                    f"failure_budget is {self.budget.limit}. Last error: {report.error}"
                )
            )

    @property
    def is_over(self) -> bool:
        """Nothing will become ready any more: admission is closed, by a drain that may have been cancelled, and all has ended."""
        return self._admission.cancel_called and not len(self.live)

    async def drain(self, grace: float, cause: Cause = Cause.SHUTDOWN) -> None:
        """Stop admitting, let the running finish for ``grace`` seconds, cancel the rest and wait for their wrap-up.

        Then what waits is given back to the source, unless a ledger keeps it. Of several drains the shortest grace counts.
        ``cause``: what the cancelled attempts are told.
        """
        limit = self.context.settings.deadlines
        give_up = trio.current_time() + max(limit.drain, grace + limit.abort)
        self._admission.cancel(reason="drain")
        self.ready.lift_bound()
        self.ready.came.notify()  # if this is cancelled, whoever waits hears of the end all the same
        with trio.move_on_after(max(0.0, grace)):
            await self.live.changed.wait_until(lambda: not len(self.live))
        self.live.cancel_all(cause, "the engine drains")
        await self.live.changed.wait_until(lambda: not len(self.live))
        # A source that was cut off half-way would be given the same prompts again on leaving.
        with trio.move_on_after(give_up - trio.current_time(), shield=True):
            async with self._giving_back:
                await self.give_back(list(self.book.entries(State.WAITING, State.RUNNING)))
        self.ready.came.notify()

    async def give_back(self, entries: Sequence[Entry]) -> None:
        """Return these groups to the source; with a ledger they stay where they are, and it remembers them."""
        if self.record.ledger is not None or not entries:
            return
        self.queue.clear()
        try:
            await self.source.give_back([entry.prompt for entry in entries])
        except Exception as error:  # noqa: BLE001  the boundary of the source: its failure becomes the engine's
            self.fate.fail(_source_failed(error))
            return
        for entry in entries:
            self.book.apply(entry, Event.RETURN)


def _source_failed(error: Exception) -> RolloutError:
    """A failure of the source, or of the ledger that was told of its prompts. A source's EndOfData is not the engine's."""
    if isinstance(error, SourceError | LedgerError | DataRefused):
        return error
    failure = SourceError(f"the source failed: {type(error).__name__}: {words_of(error)}")
    failure.__cause__ = error
    return failure


async def record_pull(
    record: LedgerWriter, prompts: Sequence[Prompt], source: Source
) -> Mapping[GroupId, QuarantineReport]:
    """Write down that these prompts left the source, and the end of those that can't be stored; returns their reports.

    Blocks until it is on disk, in one transaction; without a ledger this returns at once. Cancelled before the write was
    accepted, nothing is written.

    Raises:
      DataRefused: it is not a prompt that can't be stored, but the source's state.
      LedgerError: the write failed; the engine fails with it.
    """
    refused: dict[GroupId, QuarantineReport] = {}
    if record.ledger is None:
        return refused
    state = source.state()
    while True:  # noqa: ASYNC913  each round refuses one prompt more, so it ends; writing is a cancel point
        stored = tuple(_without_data(prompt) if prompt.group_id in refused else prompt for prompt in prompts)
        ends = (Quarantined(report=report) for report in refused.values())
        try:
            await record.write(Pulled(prompts=stored, source_state=state), *ends)
        except DataRefused as error:
            if error.group is None or error.group in refused:
                raise
            failure = failure_of(error, group=error.group)
            refused[error.group] = QuarantineReport(id=error.group, cause=Cause.ERROR, attempts=0, error=failure)
        else:
            return refused


def _without_data(prompt: Prompt) -> Prompt:
    """What stands in the ledger for a prompt that can't."""
    return Prompt(id=prompt.id, epoch=prompt.epoch, text="(it could not be stored)")
