"""The pool: pulls prompts, admits groups while slots are free, settles each attempt exactly once, drains.

The nesting is the rule (docs/decisions/0030-leaving-the-engine-is-one-phase.md):

    serve
    └─ beside                 notes why the servers are blocked, logs overdue groups, until every attempt is over
       └─ attempts            one task for each attempt, until its group is settled
          └─ admission        cancelled by a drain, or when the engine's block is left
             └─ admitting     pulls prompts; starts groups; one task for each requeued group that backs off

A drain cancels the inner scope. What runs is outside of it, so it may finish; the nursery of attempts is left when the
last attempt has ended, however late that is. Only then are unfinished groups given back to the source: no task is left
that could still settle one of them, so giving back needs no lock. Nothing here is polled: the objects of the engine's
state wake the pool when they change.

Requeued groups join the queue at its end: behind what was waiting, before what was never pulled.
"""

import logging
from collections.abc import Sequence
from typing import final

import attrs
import trio

from .._core.admission import may_pull, may_start, pullable, startable
from .._core.book import Entry
from .._core.enums import Cause
from .._core.events import GroupFiltered, GroupQuarantined, GroupReady, GroupRequeued, GroupStarted
from .._core.failures import failure_of, words_of
from .._core.ledger_events import Filtered, Quarantined, Ready, Requeued
from .._core.lifecycle import Event, State
from .._core.samples import SampleState, wasted_for_good
from .._core.values import Prompt, QuarantineReport, Trajectory
from .._util.time import retry_wait_s, wait_s
from .._util.user_code import ends_the_process
from ..errors import DataRefused, LedgerError, RolloutError, SourceError
from ._attempt import Attempt, Dropped, Finished, Outcome, Unfinished, new_attempt
from ._group import run_attempt
from ._slots import SlotLease
from ._state import EngineState, Phase

_LOGGER = logging.getLogger("trio_rollout")


@final
@attrs.define(eq=False, repr=False)
class Pool:
    """Owns the nursery of attempts."""

    state: EngineState
    _admission: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _admitting: trio.Nursery | None = attrs.field(default=None, init=False)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run until admission is closed and every attempt is over. After a drain, give back what is unfinished."""
        async with trio.open_nursery() as beside:
            beside.start_soon(self._note_blocked, name="note why servers are blocked")
            beside.start_soon(self.state.running.log_overdue, self.state.context.show_tasks, name="log overdue groups")
            if self.state.recorder is not None:
                beside.start_soon(self.state.recorder.serve, name="record finished samples")
            async with trio.open_nursery() as attempts:
                task_status.started()
                with self._admission:
                    await self._admit_groups(attempts)
            await self.state.flush_samples()
            beside.cancel_scope.cancel(reason="every attempt is over")
        if self.state.phase is Phase.DRAINING:  # when the block is left, ``close`` gives back, after this task's end
            await self._give_back(self.state.context.settings.deadlines.drain, State.WAITING, State.RUNNING)
            self.state.go_on_to(Phase.OVER)

    async def _note_blocked(self) -> None:
        failure, servers = self.state.failure, self.state.context.servers
        await self._note_missing_weights()
        while True:
            failure.block(await servers.blocked_reason_after(failure.blocked_reason))

    async def _note_missing_weights(self) -> None:
        """Note that the first weight update is missing once it has been for as long as a control call may take."""
        gate, failure, wait_until = self.state.context.gate, self.state.failure, self.state.wake.consumers.wait_until
        seconds = self.state.context.settings.deadlines.control
        while gate.awaits_weights:  # noqa: ASYNC913  waiting is the checkpoint
            await wait_until(lambda: not gate.changing)
            with trio.move_on_after(seconds) as patience:
                await wait_until(lambda: gate.changing or not gate.awaits_weights)
            if patience.cancelled_caught:
                failure.block(
                    "EngineSettings(wait_for_weights=True): no request is sent before the first weight_update"
                )
                await wait_until(lambda: gate.changing or not gate.awaits_weights)
                failure.block(None)

    async def _admit_groups(self, attempts: trio.Nursery) -> None:
        async with trio.open_nursery() as admitting:
            admitting.start_soon(self._pull, name="pull prompts")
            self._admitting = admitting
            try:
                while True:
                    for _ in range(await self.state.wake.admission.wait_until(self._startable)):
                        self._start(attempts)
            finally:
                self._admitting = None

    def _startable(self) -> int:
        state = self.state
        if not state.queue or not may_start(free_slots=state.slots.free, per_group=state.next_needs):
            return 0
        return startable(state.load())

    def _pullable(self) -> int:
        state = self.state
        might = may_pull(
            free_slots=state.slots.free, per_group=state.per_group, eligible=len(state.queue), ahead=state.ahead
        )
        return pullable(state.load()) if might else 0

    async def _pull(self) -> None:
        state = self.state
        while not state.exhausted:
            count = await state.wake.admission.wait_until(self._pullable)
            try:
                await self._pull_some(count)
            except BaseException as error:  # noqa: ASYNC103  the boundary of the source: its failure becomes the engine's
                if ends_the_process(error):
                    raise
                state.failure.fail(_source_failed(error))
                return  # noqa: ASYNC104  a real cancellation was raised again above

    async def _pull_some(self, count: int) -> None:
        state = self.state
        prompts = await state.source.take(count)
        if not prompts:
            state.end_data()
            return
        entries = self._entered(prompts, count)
        refused = await state.ledger.write_pull(prompts, state.source)
        state.enqueue(entry for entry in entries if entry.id not in refused)
        for entry in entries:
            if entry.id in refused:
                self._quarantine(entry, refused[entry.id])

    def _entered(self, prompts: Sequence[object], count: int) -> Sequence[Entry]:
        """Enter what a take gave into the book. What can't be entered is kept, to be given back with the others.

        Raises:
          SourceError: too much was given, something else than prompts, or a prompt for the second time.
        """
        state, entries, error = self.state, [], None
        real = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        if len(prompts) > count or len(real) < len(prompts):
            error = SourceError(f"source.take({count}) must give at most {count} prompts, got {prompts!r:.200}")
        for prompt in real:
            try:
                entries.append(state.book.pull(prompt, state.per_group))
            except SourceError as refused:
                error = error or refused
                state.unentered.append(prompt)
        if error is not None:
            raise error
        return entries

    def _start(self, attempts: trio.Nursery) -> None:
        state = self.state
        entry = state.queue.popleft()
        state.book.start(entry)
        seconds = state.context.settings.deadlines.group
        attempt = new_attempt(
            entry.prompt,
            entry.attempt,
            entry.samples,
            seconds=seconds,
            min_samples=state.context.settings.min_samples,
            recorder=state.recorder,
            tally=state.tally,
            turns=state.turns_of(entry),
        )
        lease = state.slots.claim(entry.samples.count(SampleState.MISSING))
        state.context.instruments.emit(GroupStarted(id=entry.id, attempt=entry.attempt))
        attempts.start_soon(self._run, entry, attempt, lease, name=f"group {entry.id} attempt {entry.attempt}")

    async def _run(self, entry: Entry, attempt: Attempt, lease: SlotLease) -> None:
        state = self.state
        with state.running.holding(attempt):
            outcome = await run_attempt(attempt, state.context, lease)
            try:
                backoff = await self._settle(entry, attempt, outcome)
            except LedgerError as error:  # on disk the group is unfinished, and it stays so here
                state.failure.fail(error)
                return
        if backoff is not None and self._admitting is not None:
            self._admitting.start_soon(self._rest, entry, backoff, name=f"group {entry.id} backs off")

    async def _rest(self, entry: Entry, seconds: float) -> None:
        """Let a requeued group start after its backoff. A drain cancels this, and gives the group back."""
        await wait_s(seconds)
        self.state.enqueue([entry])

    async def _settle(self, entry: Entry, attempt: Attempt, outcome: Outcome) -> float | None:
        """Record the outcome, then show it. Return the seconds until a requeued group may start; None for all others."""
        if self.state.recorder is not None and not isinstance(outcome, Unfinished):
            self.state.recorder.forget(entry.id)
        try:
            return await self._settle_as(outcome, entry, attempt)
        except DataRefused as error:  # user code put something into it that no other try would leave out
            failure = failure_of(error, group=entry.id, attempt=attempt.number)
            await self._give_up(entry, Unfinished(Cause.ERROR, failure, permanent=True), unscored=())
            return None

    async def _settle_as(self, outcome: Outcome, entry: Entry, attempt: Attempt) -> float | None:
        state, samples = self.state, entry.samples
        match outcome:
            case Finished(group=group):
                wasted = wasted_for_good(samples) if group.missing else samples.wasted
                await state.ledger.write(Ready(group=group, tokens=samples.kept_tokens, wasted=wasted))
                state.budget.group_ready()
                await state.make_ready(entry, group)
                state.context.instruments.emit(GroupReady(id=entry.id, attempt=attempt.number, group=group))
            case Dropped(reason=reason):
                await state.ledger.write(
                    Filtered(
                        id=entry.id,
                        attempt=attempt.number,
                        reason=reason,
                        tokens=samples.kept_tokens,
                        wasted=wasted_for_good(samples),
                    )
                )
                state.budget.group_ready()
                state.book.apply(entry, Event.FILTER)
                state.tally.filter(samples)
                state.context.instruments.emit(GroupFiltered(id=entry.id, attempt=attempt.number, reason=reason))
            case Unfinished():
                return await self._settle_unfinished(entry, attempt, outcome)
        return None

    async def _settle_unfinished(self, entry: Entry, attempt: Attempt, outcome: Unfinished) -> float | None:
        state = self.state
        if outcome.cause in {Cause.SHUTDOWN, Cause.CANCELLED} and not state.ledger.keeps_groups:
            return None  # it is given back to the source when every attempt is over: no requeue
        if outcome.permanent or not entry.samples.can_complete(attempt.min_samples):
            await self._give_up(entry, outcome, unscored=entry.samples.unscored())
            return None
        if state.recorder is not None:
            state.recorder.forget_tries(entry.id)  # this event has them
        attempts = max(sample.attempts for sample in entry.samples)
        await state.ledger.write(
            Requeued(
                id=entry.id,
                attempt=attempt.number,
                cause=outcome.cause,
                attempts=attempts,
                unpenalized=0,
                error=outcome.failure,
                samples=tuple(sample.counts for sample in entry.samples),
                wasted=entry.samples.wasted,
            )
        )
        state.book.requeue(entry, outcome.cause)
        state.context.instruments.emit(
            GroupRequeued(id=entry.id, attempt=attempt.number, cause=outcome.cause, error=outcome.failure)
        )
        backoff = max(1, attempts) if outcome.cause.uses_attempt else 0
        return retry_wait_s(backoff, retry=state.context.settings.retry, rng=state.context.ports.random)

    async def _give_up(self, entry: Entry, outcome: Unfinished, *, unscored: Sequence[Trajectory]) -> None:
        """Quarantine a group. Its finished samples are written first, so that they can be looked at and scored again."""
        report = QuarantineReport(
            id=entry.id,
            cause=outcome.cause,
            attempts=max(sample.tries for sample in entry.samples),
            error=outcome.failure,
        )
        if (turns := self.state.turns_of(entry)) is not None:
            turns.forget_all(outcome.cause)
        await self.state.flush_samples()
        await self.state.ledger.write(Quarantined(report=report, unscored=tuple(unscored), wasted=entry.samples.wasted))
        self._quarantine(entry, report)

    def _quarantine(self, entry: Entry, report: QuarantineReport) -> None:
        state = self.state
        state.book.quarantine(entry, report)
        state.tally.drop(report.cause, entry.samples.kept_tokens)
        _LOGGER.error("group %s is quarantined after %d tries: %s", entry.id, report.attempts, report.error)
        state.context.instruments.emit(GroupQuarantined(id=entry.id, report=report))
        if state.budget.group_failed():
            state.failure.fail(
                RolloutError(
                    f"{state.budget.in_a_row} groups in a row failed for good and none became ready in between; "
                    f"failure_budget is {state.budget.limit}. Last error: {report.error}"
                )
            )

    async def drain(self, grace: float) -> None:
        """Stop admitting, let the running groups finish for ``grace`` seconds, cancel the rest, wait for their end.

        Returns once the unfinished groups have been given back. Of several drains the shortest grace counts. Cancelled,
        the drain goes on without this call: the groups that run may finish, without a limit.
        """
        self._close_admission(Phase.DRAINING)
        await self._end_attempts(grace, Cause.SHUTDOWN)
        await self.state.wake.consumers.wait_until(lambda: self.state.phase in {Phase.OVER, Phase.CLOSED})

    async def leave(self, grace: float, cause: Cause) -> None:
        """Refuse calls, stop admitting, let the running groups finish for ``grace`` seconds, cancel the rest with ``cause``.

        Blocks until every attempt and every evaluation has ended.
        """
        self._close_admission(Phase.LEAVING)
        await self._end_attempts(grace, cause)
        await self.state.flush_samples()
        await self.state.evaluations.until_none()

    def _close_admission(self, phase: Phase) -> None:
        self.state.go_on_to(phase)
        self._admission.cancel(reason="drain")

    async def _end_attempts(self, grace: float, cause: Cause) -> None:
        running = self.state.running
        with trio.move_on_after(max(0.0, grace)):
            await running.until_none()
        running.cancel_all(cause, "the engine drains")
        await running.until_none()

    async def close(self, seconds: float) -> None:
        """Give back every group that is unfinished or was not taken, within ``seconds``; every task has ended."""
        try:
            await self._give_back(seconds, State.WAITING, State.RUNNING, State.READY)
        finally:
            for entry in self.state.book.entries(State.RUNNING):  # with a ledger, or if the source did not take it
                self.state.book.apply(entry, Event.REQUEUE)
            self.state.go_on_to(Phase.CLOSED)

    async def _give_back(self, seconds: float, *states: State) -> None:
        """Return the groups in these states to the source; with a ledger they stay where they are.

        Shielded: a source that is cut off half-way would be given the same prompts again.
        """
        state = self.state
        entries = list(state.book.entries(*states))
        if state.ledger.keeps_groups or not (entries or state.unentered):
            return
        state.queue.clear()
        state.ready.remove([entry for entry in entries if entry.state is State.READY])
        with trio.move_on_after(seconds, shield=True):
            try:
                await state.source.give_back([*(entry.prompt for entry in entries), *state.unentered])
            except BaseException as error:  # noqa: ASYNC103  the boundary of the source: its failure becomes the engine's
                if ends_the_process(error):
                    raise
                state.failure.fail(_source_failed(error))
                return  # noqa: ASYNC104  a real cancellation was raised again above
            state.unentered.clear()
            for entry in entries:
                state.book.apply(entry, Event.RETURN)
                state.tally.drop(Cause.SHUTDOWN, entry.samples.kept_tokens)


def _source_failed(error: BaseException) -> RolloutError:
    """Return a failure of the source, or of the ledger that was told of its prompts. A source's EndOfData is not the engine's."""
    if isinstance(error, SourceError | LedgerError | DataRefused):
        return error
    failure = SourceError(f"the source failed: {type(error).__name__}: {words_of(error)}")
    failure.__cause__ = error
    return failure
