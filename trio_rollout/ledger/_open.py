"""The way from tasks to blocking disk calls: bounded, and never abandoned once it has begun.

open_ledger: a ledger on disk as a scope, with its one writer inside.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Protocol, TypeVar, final

import attrs
import trio

from .._core.events import Event, Recovered, RunIdentity
from .._util.service import open_service
from ..errors import LedgerError
from ._disk import Disk, RealDisk
from ._group_commit import BatchLimits, GroupCommit
from ._records import Record, record_of, size_of
from ._store import Store, StoreLimits

T = TypeVar("T")


class RunIO(Protocol):
    """Runs a blocking call. A simulation runs it in place, for threads would make its clock run away."""

    async def __call__(self, call: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
        """Run it under one of the limiter's tokens."""
        ...


async def run_io(call: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
    """Run a blocking call in a thread, under one of the limiter's tokens.

    Blocks until there is a token, then until the call has ended. Cancelled while it waits for the token, the call is not
    made. Once it is made, nothing interrupts it: token and arguments are held until it has ended, however often the
    caller is cancelled; then its own result or error is what comes back, and the cancellation waits for the next
    checkpoint.
    """
    # This is what trio promises of an unabandonable thread; tests/ledger/test_io.py holds it to that.
    return await trio.to_thread.run_sync(call, abandon_on_cancel=False, limiter=limiter)


_BATCH, _SIZES = BatchLimits(), StoreLimits()


@final
@attrs.define(eq=False, repr=False)
class DiskLedger:
    """The engine's memory on disk. Got from ``open_ledger``."""

    _store: Store
    _io: RunIO
    _limits: BatchLimits
    _settings: Mapping[str, str]
    _limiter: trio.CapacityLimiter = attrs.field(factory=partial(trio.CapacityLimiter, 1), init=False)
    _commits: GroupCommit[Record] = attrs.field(init=False)
    _begun: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._commits = GroupCommit(self._write, self._tidy, self._limits)

    async def begin(self, identity: RunIdentity) -> Recovered:
        """Bind the ledger to a run and return what it remembers.

        Blocks while it is read. Cancelled, the ledger may be bound to the run; that is all.

        Raises:
          LedgerError: it belongs to another run, or is damaged.

        """
        whole = attrs.evolve(identity, settings={**identity.settings, **self._settings})
        found = await self._run(partial(self._store.begin, whole))
        self._begun = True
        return found

    async def record(self, events: Sequence[Event]) -> None:
        """Write these events in one transaction.

        Blocks until they are on disk. Cancelled before the write was accepted, nothing is written; later it waits for
        the write's end and returns normally.

        Raises:
          DataRefused: they hold user data that can't be stored; only they are refused.
          LedgerError: they contradict what the ledger knows (only they are refused), or this write or one before it
            failed (nothing will ever be written again).

        """
        if not self._begun:
            raise LedgerError(f"ledger {self._store.where}: nothing can be recorded before begin()")
        record = record_of(events)
        await self._commits.submit(record, size_of(record))

    async def _write(self, batch: Sequence[Record]) -> Sequence[LedgerError | None]:
        return await self._run(partial(self._store.commit, batch))

    async def _tidy(self) -> None:
        if self._store.untidy:
            await self._run(self._store.tidy)
        else:
            await trio.lowlevel.checkpoint()

    async def _run(self, call: Callable[[], T]) -> T:
        return await self._io(call, limiter=self._limiter)

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Owns the open store, as a task of its own: not even a Ctrl-C, which hits the main task, keeps it from closing."""
        await self._run(self._store.open)
        try:
            task_status.started()
            await self._commits.serve()
        finally:
            with trio.CancelScope(shield=True):  # unbounded like the write it ends: a thread can't be left behind
                await self._run(self._store.close)

    async def _leave(self, _: object, __: BaseException | None) -> None:
        self._commits.refuse(LedgerError(f"ledger {self._store.where} is closed"))
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_ledger(
    path: str | PathLike[str],
    *,
    keep_acked: bool = False,
    settings: Mapping[str, str] | None = None,
    batch: BatchLimits = _BATCH,
    sizes: StoreLimits = _SIZES,
    disk: Disk | None = None,
    io: RunIO = run_io,
) -> AsyncGenerator[DiskLedger]:
    """A durable ledger in a directory, which is created if need be.

    ``keep_acked`` keeps acked groups for ``trio-rollout export``; otherwise their space is reclaimed. A ledger belongs to the
    source and the samples per prompt of its first run; ``settings`` says what else must not change between its runs, by
    name: ``{"reward": "exact_match, version 2"}``. ``batch`` and ``sizes`` bound commits and files; ``disk`` and ``io`` are for simulations. Entering blocks while what an earlier
    run left is made consistent; leaving blocks for the write that was accepted, and for closing the database.

    Raises:
      LedgerError: the ledger is in use by a living process, of a newer format, or damaged.

    """
    where = fspath(path)
    store = Store(where=where, disk=disk or RealDisk(Path(where)), keep_acked=keep_acked, limits=sizes)
    ledger = DiskLedger(store, io, batch, settings or {})
    async with open_service(ledger._serve, ledger._leave):
        yield ledger
