"""Delivery: from ready to acked, in batches, one at a time and in order.

Invariant 4: a cancelled ``next_batch`` has taken nothing. A group stays in the ready buffer until the ledger has its
delivery; between the end of that write and the claim of the groups there is no checkpoint.

Groups that an earlier process had delivered, and that were not acked, are ready in this one. A ``restore`` to a step acks those
that were delivered up to it; without one, the first change of hands takes their deliveries back.
See docs/decisions/0057-a-restore-acks-what-the-checkpoint-has.md.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import final

import attrs
import trio

from .._core.batching import Answer, Decision, decide
from .._core.book import Entry
from .._core.checks import is_whole
from .._core.enums import Cause
from .._core.events import BatchAcked, BatchDelivered, GroupRequeued, GroupStarved
from .._core.ledger_events import Acked, Delivered, LedgerEvent, Recovered, Requeued, Restored, SampleKept
from .._core.lifecycle import Event, State
from .._core.samples import Samples
from .._core.statistics import EngineStatistics
from .._core.values import Group, GroupId
from ..errors import EndOfData, EngineClosed, RolloutError, ServerError
from ._state import EngineState

_LOGGER = logging.getLogger("trio_rollout")


@final
@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Finished groups, handed out together as one step.

    ``step`` grows by one a batch, across restarts. ``redelivered``: some of them were handed out before, to a trainer that
    went back to an older checkpoint or died. ``statistics`` is the engine's at the moment of delivery.
    """

    id: str
    step: int
    groups: tuple[Group, ...] = attrs.field(repr=lambda groups: f"<{len(groups)}>")
    statistics: EngineStatistics = attrs.field(repr=False)
    redelivered: bool
    _ack: Callable[["Batch"], Awaitable[None]] = attrs.field(repr=False, alias="ack")

    async def ack(self) -> None:
        """Say that no restore will ever go back before this batch: call it when your checkpoint is safe.

        Blocks until the ledger has it. Cancelled before that, the batch is not acked and may be acked again.

        Raises:
          RolloutError: it was acked before, or it is not a batch that this engine has out.
        """
        await self._ack(self)


@final
@attrs.define(eq=False, repr=False)
class Delivery:
    """Owns the groups that are out, by step."""

    state: EngineState
    next_step: int = attrs.field(default=0, init=False)
    _out: dict[int, tuple[str, list[Entry]]] = attrs.field(factory=dict, init=False)
    _seen: set[Entry] = attrs.field(factory=set, init=False)
    _earlier: dict[int, list[Entry]] = attrs.field(factory=dict, init=False)
    """The groups that an earlier process had delivered, by step, until the first restore or change of hands."""
    _last_acked: int = attrs.field(default=-1, init=False)
    _turn: trio.StrictFIFOLock = attrs.field(factory=trio.StrictFIFOLock, init=False)
    _moving: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    """Held while groups change hands, until the ledger has it: the next change must see the one before it as a whole."""

    def recover(self, past: Recovered) -> None:
        """Take over what a ledger remembers: groups that had been delivered before, those that had not, the last ack."""
        book = self.state.book
        self._earlier = {step: [book.enter(_ready_entry(group)) for group in groups] for step, groups in past.delivered}
        seen = [entry for entries in self._earlier.values() for entry in entries]
        fresh = [book.enter(_ready_entry(group)) for group in past.ready]
        for entry in (*seen, *fresh):
            self.state.tally.recover(entry.samples)
        self._seen.update(seen)
        self.state.ready.add([*seen, *fresh])
        self._last_acked = -1 if past.acked_step is None else past.acked_step
        self.next_step = past.next_step

    async def next_batch(self, size: int) -> Batch:
        """Wait for ``size`` groups and hand them out; see ``RolloutEngine.next_batch``."""
        state = self.state
        async with self._turn:
            state.want(size)
            try:
                while True:
                    await state.wake.consumers.wait_until(
                        lambda: decide(size, state.supply()).answer is not Answer.WAIT or bool(self._stale())
                    )
                    async with self._moving:  # while this waited for it, the decision may have changed
                        stale = self._stale()
                        decision = decide(size, state.supply())
                        if stale:
                            await self._recycle(stale)
                        elif decision.answer is Answer.TAKE:
                            return await self._hand_out(decision.count)
                        elif decision.answer is not Answer.WAIT:
                            self._raise_for(decision)
            finally:
                state.want(0)

    def _stale(self) -> list[Entry]:
        ready = self.state.ready
        return self.state.staleness.too_old(ready.entries, ready.oldest)

    async def _recycle(self, stale: Sequence[Entry]) -> None:
        """Requeue groups that are too old for the trainer that would get them now."""
        state, instruments = self.state, self.state.context.instruments
        settings, version = state.context.settings.staleness, state.context.gate.version
        dropped = {entry: entry.samples.stale(settings, version) for entry in stale}
        await state.ledger.tell(
            *self._taken_back(), *(event for entry in stale for event in _requeued(entry, dropped[entry]))
        )
        self._earlier.clear()
        for entry in stale:
            for index in dropped[entry]:
                state.tally.drop(Cause.STALE, entry.samples[index].tokens)
                entry.samples.drop(index)
            state.book.recycle(entry)
            instruments.emit(GroupRequeued(id=entry.id, attempt=entry.attempt, cause=Cause.STALE, error=None))
            if state.staleness.has_starved(entry):
                _LOGGER.warning("group %s was too old %d times and is starved", entry.id, entry.recycles)
                instruments.emit(GroupStarved(id=entry.id, recycles=entry.recycles))
        state.ready.remove(stale)
        state.enqueue(stale)

    def _raise_for(self, decision: Decision) -> None:
        failure = self.state.failure
        if decision.answer is Answer.FAILED and failure.error is not None:
            failure.tell(failure.error)
        if decision.answer is Answer.BLOCKED:
            raise ServerError(str(failure.blocked_reason))
        if decision.answer is Answer.END:
            raise self._end_of_data()
        raise EngineClosed("the engine is drained and nothing deliverable is left")

    def _end_of_data(self) -> EndOfData:
        counts = self.state.statistics()
        delivered = counts.delivered + counts.acked
        message = f"the source has ended: {delivered} groups delivered, {counts.filtered} filtered, {counts.quarantined} quarantined"
        return EndOfData(message, delivered=delivered, quarantined=counts.quarantined)

    async def _hand_out(self, count: int) -> Batch:
        state, step = self.state, self.next_step
        entries = state.staleness.in_order(state.ready.entries)[:count]
        await state.ledger.tell(*self._taken_back(), Delivered(step=step, ids=_ids(entries)))
        self._earlier.clear()
        self.next_step = step + 1
        for entry in entries:
            state.book.apply(entry, Event.DELIVER)
            state.tally.deliver(entry.samples)
        state.staleness.note_delivered(count)
        state.ready.remove(entries)
        batch = Batch(
            id=state.context.ports.new_rid(),
            step=step,
            groups=tuple(entry.group for entry in entries if entry.group is not None),
            statistics=state.statistics(),
            redelivered=not self._seen.isdisjoint(entries),
            ack=self.ack,
        )
        self._out[step] = (batch.id, entries)
        self._seen.difference_update(entries)
        state.context.instruments.emit(
            BatchDelivered(id=batch.id, step=step, groups=_ids(entries), redelivered=batch.redelivered)
        )
        return batch

    def _taken_back(self) -> Iterator[LedgerEvent]:
        """Yield the end of the deliveries of an earlier process that no restore has asked for."""
        if self._earlier:
            yield Restored(step=self.next_step - 1, ids=_ids(chain(*self._earlier.values())))

    async def ack(self, batch: Batch) -> None:
        """Note that the batch's groups will never be asked for again; see ``Batch.ack``."""
        state = self.state
        state.failure.check()
        async with self._moving:
            known_id, entries = self._out.get(batch.step, ("", []))
            if known_id != batch.id:
                raise RolloutError(
                    f"ack of batch {batch.id} (step {batch.step}): it is acked already, taken back by a restore, or of "
                    f"another engine; steps that can be acked: {sorted(self._out)}"
                )
            await state.ledger.tell(Acked(step=batch.step, ids=_ids(entries)))
            del self._out[batch.step]
            self._last_acked = max(self._last_acked, batch.step)
            for entry in entries:
                state.book.apply(entry, Event.ACK)
            state.context.instruments.emit(BatchAcked(id=batch.id, step=batch.step))

    async def restore(self, step: int) -> None:
        """Offer again what was delivered after ``step`` and not acked; see ``RolloutEngine.restore``."""
        state = self.state
        state.failure.check()
        async with self._moving:
            self._check_step(step)
            later = sorted(number for number in self._out if number > step)
            entries = [entry for number in later for entry in self._out[number][1]]
            had = {number: entries for number, entries in sorted(self._earlier.items()) if number <= step}
            again = [entry for number, entries in self._earlier.items() if number > step for entry in entries]
            await state.ledger.tell(
                *(Acked(step=number, ids=_ids(entries)) for number, entries in had.items()),
                Restored(step=step, ids=_ids([*again, *entries])),
            )
            for number in later:
                del self._out[number]
            self.next_step = step + 1
            self._earlier.clear()
            self._ack_earlier(had)
            self._seen.update(entries)
            for entry in entries:
                state.book.apply(entry, Event.RESTORE)
                state.tally.take_back(entry.samples)
            state.ready.put_in_front(entries)

    def _check_step(self, step: int) -> None:
        if not is_whole(step, -1) or step >= self.next_step:
            raise ValueError(
                f"restore({step!r}): a whole number from -1 to {self.next_step - 1}, the last step that was delivered, is wanted"
            )
        if step < self._last_acked:
            raise RolloutError(
                f"restore({step}): step {self._last_acked} was acked, so no restore may go back before it"
            )

    def _ack_earlier(self, had: Mapping[int, Sequence[Entry]]) -> None:
        """End groups that an earlier process had delivered: the trainer's checkpoint has them."""
        state, entries = self.state, list(chain(*had.values()))
        self._last_acked = max(self._last_acked, *had, -1)
        self._seen.difference_update(entries)
        state.ready.remove(entries)
        for entry in entries:
            state.book.apply(entry, Event.DELIVER)
            state.book.apply(entry, Event.ACK)
            state.tally.deliver(entry.samples)


def _ids(entries: Iterable[Entry]) -> tuple[GroupId, ...]:
    return tuple(entry.id for entry in entries)


def _ready_entry(group: Group) -> Entry:
    samples = Samples.recovered(len(group.trajectories) + len(group.missing), group.trajectories, ())
    return Entry(
        id=group.id, prompt=group.prompt, state=State.READY, attempt=group.attempt, samples=samples, group=group
    )


def _requeued(entry: Entry, dropped: Sequence[int]) -> Iterator[LedgerEvent]:
    """Yield the events of a group that waits again, with those of its samples that are still fresh enough."""
    counts = tuple(sample.counts for sample in entry.samples)
    lost = sum(entry.samples[index].tokens for index in dropped)
    wasted = {**entry.samples.wasted, Cause.STALE: entry.samples.wasted.get(Cause.STALE, 0) + lost}
    yield Requeued(
        id=entry.id,
        attempt=entry.attempt,
        cause=Cause.STALE,
        attempts=0,
        unpenalized=0,
        samples=counts,
        wasted=wasted,
    )
    for trajectory in entry.samples.kept():
        if trajectory.index not in dropped:
            tokens = entry.samples[trajectory.index].tokens
            yield SampleKept(id=entry.id, attempt=entry.attempt, trajectory=trajectory, tokens=tokens)
