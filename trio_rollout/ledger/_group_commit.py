"""GroupCommit: many callers, one writer, a few large writes.

Invariant 1: a caller returns normally only after its own write is done, and raises Cancelled only if it was withdrawn
before a write took it: "on disk" and "still mine" exclude each other.
Invariant 2: after one failed write nothing is ever written again; all who wait and all who come get the cause.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, final

import attrs
import outcome
import trio

from ..errors import LedgerError

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class BatchLimits:
    """Bounds of one batch. A single write above ``bytes`` goes alone.

    64: what slime's rollout I/O uses, and above it the gain was within noise. 16 MiB: 64 groups of 2 MB would hold one
    commit for 0.7 to 1.7 s.
    """

    items: int = 64
    bytes: int = 16 * 2**20
    linger_s: float = 0.01


@attrs.define(eq=False)
class _Entry(Generic[T]):
    item: T
    size: int
    task: trio.lowlevel.Task


@final
@attrs.define(eq=False, repr=False)
class GroupCommit(Generic[T]):
    """Joins writes into batches. ``write`` gets a batch and answers with each item's error, or None.

    ``tidy`` is called after each batch, when its callers have their answers; if it fails, nothing is written any more.
    """

    _write: Callable[[Sequence[T]], Awaitable[Sequence[LedgerError | None]]]
    _tidy: Callable[[], Awaitable[None]]
    _limits: BatchLimits = attrs.field(factory=BatchLimits)
    _waiting: deque[_Entry[T]] = attrs.field(factory=deque, init=False)
    _waiting_bytes: int = attrs.field(default=0, init=False)
    _some: trio.Event = attrs.field(factory=trio.Event, init=False)
    _enough: trio.Event = attrs.field(factory=trio.Event, init=False)
    _refusal: LedgerError | None = attrs.field(default=None, init=False)

    @trio.lowlevel.enable_ki_protection  # between queueing and waiting there is no place for a KeyboardInterrupt
    async def submit(self, item: T, size: int) -> None:
        """Have an item written.

        Blocks until its batch is on disk. Cancelled before a batch took it, it is withdrawn and nothing is written;
        later, the write's end is waited for and reported, and the cancellation waits for the next checkpoint.

        Raises:
          LedgerError: this item was refused, or a write failed, or the writer has ended.

        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._refusal is not None:
            raise _again(self._refusal)
        entry = _Entry(item, size, trio.lowlevel.current_task())
        self._enqueue(entry)

        def withdraw(_: Any) -> trio.lowlevel.Abort:
            if entry not in self._waiting:
                return trio.lowlevel.Abort.FAILED
            self._waiting.remove(entry)
            self._waiting_bytes -= entry.size
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(withdraw)

    def _enqueue(self, entry: _Entry[T]) -> None:
        self._waiting.append(entry)
        self._waiting_bytes += entry.size
        self._some.set()
        if len(self._waiting) >= self._limits.items or self._waiting_bytes >= self._limits.bytes:
            self._enough.set()

    @trio.lowlevel.enable_ki_protection  # who was accepted waits for an answer, whatever happens
    async def serve(self) -> None:
        """Write batches until cancelled. A write that has begun is finished first."""
        while True:
            await trio.lowlevel.checkpoint()
            self._some, self._enough = trio.Event(), trio.Event()
            if not self._waiting:  # who came during the last write has waited for company already
                await self._some.wait()
                with trio.move_on_after(self._limits.linger_s):
                    await self._enough.wait()
            if batch := self._take():
                await self._write_batch(batch)

    def _take(self) -> list[_Entry[T]]:
        batch: list[_Entry[T]] = []
        size = 0
        while self._waiting and len(batch) < self._limits.items:
            size += self._waiting[0].size
            if batch and size > self._limits.bytes:
                break
            batch.append(self._waiting.popleft())
            self._waiting_bytes -= batch[-1].size
        return batch

    async def _write_batch(self, batch: list[_Entry[T]]) -> None:  # noqa: ASYNC910  what it waits for is shielded
        fates: Sequence[LedgerError | None] = ()
        try:
            with trio.CancelScope(shield=True):  # the one thing without a bound: an accepted write
                fates = await self._write([entry.item for entry in batch])
        except Exception as error:  # ruff: ignore[blind-except]  whatever it was, the callers must not wait for ever
            self.refuse(_failure(error))
            fates = [_failure(error)] * len(batch)
        for entry, fate in zip(batch, fates, strict=True):
            _tell(entry, fate)
        try:
            with trio.CancelScope(shield=True):  # it writes, too
                await self._tidy()
        except Exception as error:  # ruff: ignore[blind-except]  as above
            self.refuse(_failure(error))

    def refuse(self, error: LedgerError) -> None:
        """From now on nothing is written: who waits or comes gets this error. The first one stays."""
        self._refusal = self._refusal or error
        while self._waiting:
            _tell(self._waiting.popleft(), self._refusal)
        self._waiting_bytes = 0


def _again(error: LedgerError) -> LedgerError:
    """The same failure for another caller: an exception object shared by tasks would collect all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _failure(error: Exception) -> LedgerError:
    if isinstance(error, LedgerError):
        return error
    failure = LedgerError(f"the ledger's writer failed: {error!r}")
    failure.__cause__ = error
    return failure


def _tell(entry: _Entry[Any], fate: LedgerError | None) -> None:
    answer = outcome.Value(None) if fate is None else outcome.Error(_again(fate))
    trio.lowlevel.reschedule(entry.task, answer)
