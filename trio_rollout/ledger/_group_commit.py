"""One writer for many callers: the writes that arrive together become one batch, and one sync of the disk.

A sync costs milliseconds and does not get cheaper for a small write. Bodies of 34 KB, each written alone, make 219 groups a
second; in batches of 64 they make 1,899 (the table of docs/decisions/0008-what-the-ledger-is-made-of.md). Groups of one
prompt batch tend to finish together, so after the first write of a quiet moment the writer *lingers*: it waits up to
``linger_s`` for others to join, and stops waiting once a batch is full. It lingers only when the queue was empty. A caller
that arrived while the last batch was being written has waited long enough; its batch starts at once. The linger therefore
adds at most ``linger_s`` to a write, and nothing under load.

One ``Ledger.record`` call, whose events are one transaction, is one write here
(docs/decisions/0004-the-ledger-is-told-events.md). Each caller gets the result of its write alone: a refused transaction does
not fail the others of its batch.

Invariant 1: a caller that gets Cancelled was not written; its write was withdrawn before a batch took it. The outcomes "on
disk" and "still the caller's" exclude each other.
Invariant 2: after one failed write nothing is written any more; all callers, waiting and later ones, get its cause.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, final

import attrs
import outcome
import trio

from .._core.checks import names_suggested
from ..errors import LedgerError

T = TypeVar("T")


@names_suggested
@attrs.frozen(kw_only=True)
class BatchLimits:
    """Limits of one batch: its writes, their bytes, and the seconds to wait for more of them.

    A single write above ``bytes`` goes alone. 64 items: as slime's rollout I/O; the gain above it was within noise. 16 MiB:
    64 groups of 2 MB would keep one commit busy for 0.7 to 1.7 s.
    """

    items: int = 64
    bytes: int = 16 * 2**20
    linger_s: float = 0.01


@attrs.define(eq=False)
class _Write(Generic[T]):
    """One caller's item, and the task that waits for its result."""

    item: T
    size: int
    task: trio.lowlevel.Task


@final
@attrs.define(eq=False, repr=False)
class GroupCommit(Generic[T]):
    """Joins writes into batches. ``write`` takes a batch and returns each item's error, or None.

    ``after_batch`` is awaited after each batch, when its callers have their results; if it fails, nothing is written any
    more.
    """

    _write: Callable[[Sequence[T]], Awaitable[Sequence[LedgerError | None]]]
    _after_batch: Callable[[], Awaitable[None]]
    _limits: BatchLimits = attrs.field(factory=BatchLimits)
    _queue: deque[_Write[T]] = attrs.field(factory=deque, init=False)
    _queued_bytes: int = attrs.field(default=0, init=False)
    _arrived: trio.Event = attrs.field(factory=trio.Event, init=False)
    _full: trio.Event = attrs.field(factory=trio.Event, init=False)
    _refusal: LedgerError | None = attrs.field(default=None, init=False)

    @trio.lowlevel.enable_ki_protection  # a KeyboardInterrupt must not come between queueing and waiting
    async def submit(self, item: T, size: int) -> None:
        """Have an item of ``size`` bytes written.

        Blocks until its batch is on disk. Cancelled before a batch took the item, the item is withdrawn and not written.
        Cancelled later, this waits for the write's end and returns or raises its result; the cancellation then arrives at
        the next checkpoint.

        Raises:
          LedgerError: this item was refused, or a write failed, or the writer has ended.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._refusal is not None:
            raise _copy_of(self._refusal)
        write = _Write(item, size, trio.lowlevel.current_task())
        self._enqueue(write)

        def withdraw(_: Any) -> trio.lowlevel.Abort:
            if write not in self._queue:
                return trio.lowlevel.Abort.FAILED
            self._queue.remove(write)
            self._queued_bytes -= write.size
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(withdraw)

    def _enqueue(self, write: _Write[T]) -> None:
        self._queue.append(write)
        self._queued_bytes += write.size
        self._arrived.set()
        if len(self._queue) >= self._limits.items or self._queued_bytes >= self._limits.bytes:
            self._full.set()

    @trio.lowlevel.enable_ki_protection  # an accepted caller waits for a result, whatever happens
    async def serve(self) -> None:
        """Write batches until cancelled. A write that has begun is finished first."""
        while True:
            await trio.lowlevel.checkpoint()
            self._arrived, self._full = trio.Event(), trio.Event()
            if not self._queue:  # writes that arrived during the last batch do not linger
                await self._arrived.wait()
                with trio.move_on_after(self._limits.linger_s):
                    await self._full.wait()
            if batch := self._take():
                await self._write_batch(batch)

    def _take(self) -> list[_Write[T]]:
        batch: list[_Write[T]] = []
        size = 0
        while self._queue and len(batch) < self._limits.items:
            size += self._queue[0].size
            if batch and size > self._limits.bytes:
                break
            batch.append(self._queue.popleft())
            self._queued_bytes -= batch[-1].size
        return batch

    async def _write_batch(self, batch: list[_Write[T]]) -> None:
        results: Sequence[LedgerError | None] = ()
        try:
            with trio.CancelScope(shield=True):  # an accepted write: the one shield without a time limit
                results = await self._write([write.item for write in batch])
        except Exception as error:  # ruff: ignore[blind-except]  the callers must not wait for ever
            self.refuse(_failure(error))
            results = [_failure(error)] * len(batch)
        for write, result in zip(batch, results, strict=True):
            _resume(write, result)
        try:
            with trio.CancelScope(shield=True):  # this writes, too
                await self._after_batch()
        except Exception as error:  # ruff: ignore[blind-except]  as above
            self.refuse(_failure(error))

    def refuse(self, error: LedgerError) -> None:
        """Write nothing from now on, and give this error to all callers, waiting and later ones. The first error stays."""
        self._refusal = self._refusal or error
        while self._queue:
            _resume(self._queue.popleft(), self._refusal)
        self._queued_bytes = 0


def _copy_of(error: LedgerError) -> LedgerError:
    """Return the same failure for another caller: one exception object would collect the tracebacks of all tasks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _failure(error: Exception) -> LedgerError:
    if isinstance(error, LedgerError):
        return error
    failure = LedgerError(f"the ledger's writer failed: {error!r}")
    failure.__cause__ = error
    return failure


def _resume(write: _Write[Any], result: LedgerError | None) -> None:
    trio.lowlevel.reschedule(write.task, outcome.Value(None) if result is None else outcome.Error(_copy_of(result)))
