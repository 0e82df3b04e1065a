"""From ready to acked: the buffer of finished groups, batches in order, and backpressure.

Invariant 3: ``ready`` never exceeds the bound while the engine runs: an attempt that finished waits for room, its outcome
claimed, its slots given back. Invariant 4: a cancelled ``next_batch`` has taken nothing.
"""

from collections import deque
from collections.abc import Callable
from typing import final

import attrs
import trio

from ._batch import Batch
from ._core.batching import Answer, Decision, Supply, decide
from ._core.book import Book, Entry
from ._core.enums import Cause
from ._core.events import Acked, Delivered, Requeued, Restored
from ._core.lifecycle import Event
from ._core.statistics import EngineStatistics
from ._core.values import Group
from ._fate import Fate
from ._freshness import Freshness
from ._record import Record
from ._signal import StateChange
from .errors import EndOfData, EngineClosed, RolloutError


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Delivery:
    """Owns ready and delivered groups. ``taken`` is notified when groups leave the buffer or a consumer wants more."""

    book: Book
    record: Record
    fate: Fate
    max_ready: int
    freshness: Freshness
    queue: deque[Entry]
    new_id: Callable[[], str]
    next_step: int = 0
    came: StateChange = attrs.field(factory=StateChange)
    taken: StateChange = attrs.field(factory=StateChange)
    blocked: int = attrs.field(default=0, init=False)
    _demand: int = attrs.field(default=0, init=False)
    _bounded: bool = attrs.field(default=True, init=False)
    _ready: deque[Entry] = attrs.field(factory=deque, init=False)
    _out: dict[int, tuple[str, list[Entry]]] = attrs.field(factory=dict, init=False)
    _seen: set[Entry] = attrs.field(factory=set, init=False)
    _last_acked: int = attrs.field(default=-1, init=False)
    _turn: trio.StrictFIFOLock = attrs.field(factory=trio.StrictFIFOLock, init=False)

    @property
    def bound(self) -> int:
        """How many groups may be ready: ``max_ready``, or what a waiting consumer asked for if that is more."""
        return max(self.max_ready, self._demand)

    @property
    def ready(self) -> int:
        """How many groups are ready."""
        return len(self._ready)

    def lift_bound(self) -> None:
        """From now on a finished group never waits for room: the engine is being drained."""
        self._bounded = False
        self.taken.notify()

    async def put(self, entry: Entry, group: Group) -> None:
        """Make a finished group ready, once there is room. Cancelled while it waits, it becomes ready all the same."""
        self.blocked += 1
        try:
            await self.taken.wait_until(lambda: not self._bounded or self.ready < self.bound)
        finally:
            self.blocked -= 1
            self.book.finish(entry, group)
            self._ready.append(entry)
            self.came.notify()

    def remember(self, groups: list[tuple[Entry, bool]]) -> None:
        """Put back groups that a ledger remembers; the flag says whether they had been delivered before."""
        for entry, delivered in groups:
            self._ready.append(entry)
            if delivered:
                self._seen.add(entry)

    async def next_batch(
        self, size: int, supply: Callable[[], Supply], statistics: Callable[[], EngineStatistics]
    ) -> Batch:
        """Wait for ``size`` groups and hand them out; see ``RolloutEngine.next_batch``."""
        async with self._turn:
            self._ask(size)
            try:
                while True:
                    await self.came.wait_until(
                        lambda: (
                            decide(size, supply()).answer is not Answer.WAIT
                            or bool(self.freshness.too_old(self._ready))
                        )
                    )
                    stale = self.freshness.too_old(self._ready)
                    if not stale:
                        return await self._hand_out(decide(size, supply()), statistics)
                    await self._recycle(stale)
            finally:
                self._ask(0)

    def _ask(self, size: int) -> None:
        self._demand = size
        self.freshness.note_asked(size)
        self.taken.notify()

    async def _recycle(self, stale: list[Entry]) -> None:
        """Requeue groups that are too old for the trainer that would get them now."""
        await self.record.write(*(_requeued(entry) for entry in stale))
        for entry in stale:
            self._ready.remove(entry)
            self.book.recycle(entry)
            self.freshness.note_recycled(entry)
        self.queue.extend(stale)
        self.taken.notify()

    async def _hand_out(self, decision: Decision, statistics: Callable[[], EngineStatistics]) -> Batch:
        if decision.answer is Answer.FAILED and self.fate.error is not None:
            self.fate.tell(self.fate.error)
        if decision.answer is Answer.END:
            raise EndOfData("the source has ended and every group is delivered, filtered or quarantined")
        if decision.answer is Answer.CLOSED:
            raise EngineClosed("the engine is drained and nothing deliverable is left")
        entries = self.freshness.in_order(self._ready)[: decision.count]
        for entry in entries:
            self._ready.remove(entry)
            self.book.apply(entry, Event.DELIVER)
        step = self.next_step
        self.next_step += 1
        await self._write_or_undo(step, entries)
        batch = Batch(
            id=self.new_id(),
            step=step,
            groups=tuple(entry.group for entry in entries if entry.group is not None),
            statistics=statistics(),
            redelivered=not self._seen.isdisjoint(entries),
            ack=self.ack,
        )
        self._out[step] = (batch.id, entries)
        self._seen.difference_update(entries)
        self.freshness.note_delivered(len(entries))
        self.taken.notify()
        return batch

    async def _write_or_undo(self, step: int, entries: list[Entry]) -> None:
        written = False
        try:
            await self.record.write(Delivered(step=step, ids=tuple(entry.id for entry in entries)))
            written = True
        finally:
            if not written:
                self.next_step = step
                self._back_in_front(entries)

    def _back_in_front(self, entries: list[Entry]) -> None:
        for entry in reversed(entries):
            self.book.apply(entry, Event.RESTORE)
            self._ready.appendleft(entry)
        self.came.notify()

    async def ack(self, batch: Batch) -> None:
        """The batch's groups will never be asked for again; see ``Batch.ack``."""
        self.fate.check()
        known_id, entries = self._out.get(batch.step, ("", []))
        if known_id != batch.id:
            raise RolloutError(
                f"ack of batch {batch.id} (step {batch.step}): it is acked already, taken back by a restore, or of "
                f"another engine; steps that can be acked: {sorted(self._out)}"
            )
        await self.record.write(Acked(step=batch.step, ids=tuple(entry.id for entry in entries)))
        del self._out[batch.step]
        self._last_acked = max(self._last_acked, batch.step)
        for entry in entries:
            self.book.apply(entry, Event.ACK)

    async def restore(self, step: int) -> None:
        """Offer again what was delivered after ``step`` and not acked; see ``RolloutEngine.restore``."""
        if step < self._last_acked:
            raise RolloutError(
                f"restore({step}): step {self._last_acked} was acked, so no restore may go back before it"
            )
        later = sorted(number for number in self._out if number > step)
        entries = [entry for number in later for entry in self._out[number][1]]
        await self.record.write(Restored(step=step, ids=tuple(entry.id for entry in entries)))
        for number in later:
            del self._out[number]
        self.next_step = step + 1
        self._seen.update(entries)
        self._back_in_front(entries)

    def give_up_ready(self) -> list[Entry]:
        """Empty the buffer: the engine closes and nobody will take these groups."""
        entries = list(self._ready)
        self._ready.clear()
        return entries


def _requeued(entry: Entry) -> Requeued:
    return Requeued(id=entry.id, attempt=entry.attempt, cause=Cause.STALE, attempts=entry.attempts, free=entry.free)
