"""The state of one engine: everything that its parts share, held by the pool, the delivery, the weights and evaluations.

The parts do not know each other; they meet here. An object of the state wakes the tasks that wait for it in its own
setters, so no part has to remember to notify another one.
"""

import enum
from collections import deque
from collections.abc import Iterable
from typing import final

import attrs

from .._core.admission import Load
from .._core.batching import Supply
from .._core.book import Book, Entry
from .._core.enums import Resume
from .._core.failures import FailureBudget
from .._core.ledger_events import Recovered
from .._core.lifecycle import State
from .._core.samples import Samples, SampleState
from .._core.statistics import Counts, EngineStatistics, EvaluationCounts, ServerStatistics
from .._core.tally import Tally
from .._core.values import Group, Prompt
from .._util.condition import Condition
from ..abc import Ledger, Source
from ..errors import EngineClosed
from ._context import RolloutContext
from ._ledger import EngineFailure, LedgerWriter, SampleRecorder
from ._ready import ReadyBuffer
from ._running import RunningAttempts
from ._slots import Slots
from ._staleness import StalenessPolicy
from ._turns import TurnKeeper
from ._wakeups import WakeUps

_AHEAD = 4
"""A quarter of what can run is pulled ahead: while a ledger writes a pull down, slots that become free do not wait for it."""


class Phase(enum.IntEnum):
    """The phase of an engine, on the way to its end. It only ever goes on to a later one.

    See docs/decisions/0030-leaving-the-engine-is-one-phase.md.
    """

    RUNNING = 0
    """Prompts are pulled and groups are started."""
    DRAINING = 1
    """``drain`` was called: no group is started any more, and those that run may finish."""
    OVER = 2
    """Every attempt has ended and the unfinished groups have been given back. Ready groups can still be taken."""
    LEAVING = 3
    """The engine's block is being left: every call raises EngineClosed, and what still runs is cancelled."""
    CLOSED = 4
    """The block has been left: every task has ended, and what was unfinished or not taken has been given back."""


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class EngineState:
    """One engine's state; ``new_state`` makes one.

    ``queue`` holds the waiting groups that may start. ``running`` and ``evaluations`` are the attempts under way, of
    production and of evaluations, which have slots apart. ``exhausted``: the source has ended.
    """

    context: RolloutContext
    source: Source
    wake: WakeUps
    failure: EngineFailure
    ledger: LedgerWriter
    recorder: SampleRecorder | None
    budget: FailureBudget
    book: Book
    ready: ReadyBuffer
    slots: Slots
    running: RunningAttempts
    staleness: StalenessPolicy
    evaluations: RunningAttempts = attrs.field(factory=RunningAttempts)
    evaluation_slots: Slots
    servers_before: ServerStatistics
    per_group: int
    """The number of rollouts of a group."""
    ahead: int
    """The number of prompts to have at hand, so that a free slot never waits for the source."""
    queue: deque[Entry] = attrs.field(factory=deque, init=False)
    unentered: list[Prompt] = attrs.field(factory=list, init=False)
    """Prompts of a take that could not be entered in the book: they are given back with the others."""
    phase: Phase = attrs.field(default=Phase.RUNNING, init=False)
    exhausted: bool = attrs.field(default=False, init=False)
    tally: Tally = attrs.field(factory=Tally, init=False)
    evaluated: Tally = attrs.field(factory=Tally, init=False)

    def recover(self, past: Recovered) -> None:
        """Take over the groups that a ledger remembers as settled or unfinished."""
        self.book.count_earlier(acked=past.acked, filtered=past.filtered, reports=past.quarantined)
        for item in past.unfinished:
            entry = Entry(
                id=item.prompt.group_id,
                prompt=item.prompt,
                attempt=item.attempt,
                samples=Samples.recovered(
                    self.per_group,
                    item.kept,
                    item.samples,
                    self.context.settings.retry.max_attempts,
                    unscored=item.unscored,
                    wasted=item.wasted,
                    turns=item.turns if self.context.settings.resume is Resume.TURNS else None,
                ),
            )
            self.queue.append(self.book.enter(entry))
            self.tally.recover(entry.samples)

    def turns_of(self, entry: Entry) -> TurnKeeper | None:
        """Return the keeper of a group's recorded turns; None if turns are not recorded."""
        if self.context.settings.resume is not Resume.TURNS:
            return None
        return TurnKeeper(entry.id, entry.samples, self.recorder, self.tally)

    def go_on_to(self, phase: Phase) -> None:
        """Enter a later phase; from that phase or a later one nothing changes."""
        if phase > self.phase:
            self.phase = phase
            self.wake.notify()

    def require_open(self, what: str) -> None:
        """Raise EngineClosed if the engine's block is being left or has been left."""
        if self.phase >= Phase.LEAVING:
            raise EngineClosed(f"{what}: the engine's block was left")

    def end_data(self) -> None:
        """Note that the source has ended."""
        self.exhausted = True
        self.wake.consumers.notify()

    def enqueue(self, entries: Iterable[Entry]) -> None:
        """Let waiting groups start, behind those that wait already."""
        self.queue.extend(entries)
        self.wake.admission.notify()

    def want(self, size: int) -> None:
        """Note that a consumer waits for ``size`` groups; 0 if none waits any more."""
        self.staleness.note_asked(size)
        self.ready.want(size)

    def has_room(self) -> bool:
        """Return True if a finished group may become ready now: always during a drain.

        A consumer that waits for a group must not be what that group waits for, so it lifts the bound.
        """
        if self.phase is not Phase.RUNNING:
            return True
        ready = self.ready
        return len(ready) < ready.bound or bool(ready.wanted and self.staleness.due())

    async def make_ready(self, entry: Entry, group: Group) -> None:
        """Make a finished group ready, once there is room. Cancelled while it waits, the group becomes ready anyway."""
        try:
            if not self.has_room():
                await self.wake.admission.wait_until(self.has_room)
        finally:
            self.book.finish(entry, group)
            self.ready.add([entry])

    async def flush_samples(self) -> None:
        """Write the finished samples that wait for it; without a ledger this returns at once. See ``SampleRecorder.flush``."""
        if self.recorder is not None:
            await self.recorder.flush()

    @property
    def next_needs(self) -> int:
        """The number of slots that the next group in the queue needs: its missing samples."""
        return self.queue[0].samples.count(SampleState.MISSING)

    def load(self) -> Load:
        """Return what admission decides on."""
        running = self.book.count(State.RUNNING)
        return Load(
            open=self.context.gate.is_open and self.failure.error is None and self.phase is Phase.RUNNING,
            free_slots=self.slots.free,
            per_group=self.per_group,
            eligible=len(self.queue),
            needs=(entry.samples.count(SampleState.MISSING) for entry in self.queue),
            finished=len(self.ready) + running - self.slots.holders,
            bound=self.ready.bound,
            exhausted=self.exhausted,
            fresh_room=self.staleness.room(running + len(self.ready)),
            ahead=self.ahead,
            resting=self.book.count(State.WAITING) - len(self.queue) + self.slots.resting,
            most_resting=self.slots.total // self.per_group,
        )

    def supply(self) -> Supply:
        """Return what a consumer of batches decides on."""
        return Supply(
            ready=len(self.ready),
            unfinished=self.book.count(State.WAITING) + self.book.count(State.RUNNING),
            exhausted=self.exhausted,
            drained=self.phase >= Phase.OVER,
            failed=self.failure.error is not None,
            failure_told=self.failure.told,
            due=self.staleness.due(),
            blocked=self.failure.blocked_reason is not None,
        )

    def statistics(self) -> EngineStatistics:
        """Return the counts of this moment."""
        book, servers = self.book, self.context.servers.statistics()
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
            retries=Counts(self.tally.retries),
            tokens=self.tally.tokens(),
            late=servers.late - self.servers_before.late,
            orphans=servers.orphans - self.servers_before.orphans,
            running_rollouts=self.slots.in_use,
            max_running=self.slots.total,
            rollouts=self.tally.tries,
            generated_tokens=self.tally.sampled,
            weight_version=self.context.gate.version,
            evaluations=EvaluationCounts(
                rollouts=self.evaluated.tries,
                retries=Counts(self.evaluated.retries),
                tokens=self.evaluated.tokens(),
            ),
        )


def new_state(source: Source, context: RolloutContext, ledger: Ledger | None) -> EngineState:
    """Return the state of an engine that has not started."""
    settings, wake, running = context.settings, context.gate.wake, RunningAttempts(context.gate.wake.consumers)
    failure = EngineFailure(wake)
    writer = LedgerWriter(ledger, failure)
    return EngineState(
        context=context,
        source=source,
        wake=wake,
        failure=failure,
        ledger=writer,
        recorder=None if ledger is None else SampleRecorder(writer),
        budget=FailureBudget(settings.failure_budget),
        book=Book(on_change=wake.notify),
        ready=ReadyBuffer(settings.max_ready, wake),
        slots=Slots(settings.max_running, wake.admission),
        running=running,
        staleness=StalenessPolicy(settings.staleness, context.gate, running),
        evaluation_slots=Slots(settings.max_running, Condition()),
        servers_before=context.servers.statistics(),
        per_group=settings.samples_per_prompt,
        ahead=max(1, settings.max_running // settings.samples_per_prompt // _AHEAD),
    )
