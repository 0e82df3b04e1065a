"""A batch: groups on their way to the trainer.

From ready to acked: batches, one at a time and in order.

Invariant 4: a cancelled ``next_batch`` has taken nothing. Between the decision to hand out and the claim of the groups there
is no checkpoint.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import final

import attrs
import trio

from .._core.batching import Answer, Decision, Supply, decide
from .._core.book import Book, Entry
from .._core.enums import Cause
from .._core.events import Acked, Delivered, Requeued, Restored
from .._core.lifecycle import Event
from .._core.statistics import EngineStatistics
from .._core.values import Group
from ..errors import EndOfData, EngineClosed, RolloutError, ServerError
from ._ready import ReadyBuffer
from ._staleness import StalenessPolicy
from ._state import EngineFailure, LedgerWriter


@final
@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Finished groups, handed out together as one step.

    ``step`` grows by one a batch, across restarts. ``redelivered``: some of them were handed out before, to a trainer that
    went back to an older checkpoint or died. ``statistics`` is the engine's at the moment of delivery.
    """

    id: str
    step: int
    groups: tuple[Group, ...]
    statistics: EngineStatistics
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
@attrs.define(eq=False, repr=False, kw_only=True)
class Delivery:
    """Owns the groups that are out, by step."""

    book: Book
    ready: ReadyBuffer
    record: LedgerWriter
    fate: EngineFailure
    freshness: StalenessPolicy
    queue: deque[Entry]
    new_id: Callable[[], str]
    next_step: int = 0
    _out: dict[int, tuple[str, list[Entry]]] = attrs.field(factory=dict, init=False)
    _seen: set[Entry] = attrs.field(factory=set, init=False)
    _last_acked: int = attrs.field(default=-1, init=False)
    _turn: trio.StrictFIFOLock = attrs.field(factory=trio.StrictFIFOLock, init=False)
    _moving: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    """Held while groups change hands, until the ledger has it: the next change must see the one before it as a whole."""

    def remember(self, seen: Iterable[Entry], fresh: Iterable[Entry], *, acked_step: int | None) -> None:
        """Take over what a ledger remembers: groups that had been delivered before, those that had not, the last ack."""
        self._last_acked = -1 if acked_step is None else acked_step
        seen = list(seen)
        self._seen.update(seen)
        self.ready.add([*seen, *fresh])

    async def next_batch(
        self, size: int, supply: Callable[[], Supply], statistics: Callable[[], EngineStatistics]
    ) -> Batch:
        """Wait for ``size`` groups and hand them out; see ``RolloutEngine.next_batch``."""
        async with self._turn:
            self._ask(size)
            try:
                while True:
                    await self.ready.came.wait_until(
                        lambda: decide(size, supply()).answer is not Answer.WAIT or bool(self._stale())
                    )
                    async with self._moving:  # waiting for it, what was decided may have changed
                        stale = self._stale()
                        decision = decide(size, supply())
                        if stale:
                            await self._recycle(stale)
                        elif decision.answer is not Answer.WAIT:
                            return await self._hand_out(decision, statistics)
            finally:
                self._ask(0)

    def _ask(self, size: int) -> None:
        self.freshness.note_asked(size)
        self.ready.want(size)

    def _stale(self) -> list[Entry]:
        return self.freshness.too_old(self.ready.entries)

    async def _recycle(self, stale: list[Entry]) -> None:
        """Requeue groups that are too old for the trainer that would get them now."""
        await self.record.write(*(_requeued(entry) for entry in stale))
        self.ready.remove(stale)
        for entry in stale:
            self.book.recycle(entry)
            self.freshness.note_recycled(entry)
        self.queue.extend(stale)
        self.ready.changed.notify()

    async def _hand_out(self, decision: Decision, statistics: Callable[[], EngineStatistics]) -> Batch:
        if decision.answer is Answer.FAILED and self.fate.error is not None:
            self.fate.tell(self.fate.error)
        if decision.answer is Answer.BLOCKED:
            raise ServerError(str(self.fate.obstacle))
        if decision.answer is Answer.END:
            raise EndOfData("the source has ended and every group is delivered, filtered or quarantined")
        if decision.answer is Answer.CLOSED:
            raise EngineClosed("the engine is drained and nothing deliverable is left")
        entries = self.freshness.in_order(self.ready.entries)[: decision.count]
        self.ready.remove(entries)
        for entry in entries:
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
        self.ready.changed.notify()
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
        for entry in entries:
            self.book.apply(entry, Event.RESTORE)
        self.ready.put_in_front(entries)

    async def ack(self, batch: Batch) -> None:
        """The batch's groups will never be asked for again; see ``Batch.ack``."""
        self.fate.check()
        async with self._moving:
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
        async with self._moving:
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
        entries = list(self.ready.entries)
        self.ready.remove(entries)
        return entries


def _requeued(entry: Entry) -> Requeued:
    return Requeued(
        id=entry.id, attempt=entry.attempt, cause=Cause.STALE, attempts=entry.attempts, unpenalized=entry.unpenalized
    )
