"""A ledger on disk as a scope: ``open_ledger`` runs its one writer for the length of a block.

Disk calls block, so they run in a thread (``run_io``), one at a time, and are never abandoned once they have begun.

A ledger belongs to the run that began it: to one source and one number of samples per prompt. ``open_ledger(settings=...)``
adds what the user names. Rewards, deadlines and sampling are not bound by the engine, because people restart a run just to
change them: docs/decisions/0014-what-a-ledger-belongs-to.md.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Protocol, TypeVar, final

import attrs
import trio

from .._core.ledger_events import LedgerEvent, Recovered, Rescoring, RunIdentity, Stored
from .._core.lifecycle import State
from .._util.arguments import refuse, require, require_trio
from .._util.service import open_service
from ..errors import LedgerError
from ._disk import Disk, RealDisk
from ._group_commit import BatchLimits, GroupCommit
from ._rescoring import STATES
from ._store import Store, StoreLimits
from ._transaction import Transaction, encode_transaction, size_of

T = TypeVar("T")


class RunIO(Protocol):
    """Runs a blocking call. A simulation runs it in place, because real threads would make its clock run away."""

    async def __call__(self, call: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
        """Run the call while holding one of the limiter's tokens."""
        ...


async def run_io(call: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
    """Run a blocking call in a thread, while holding one of the limiter's tokens.

    Blocks until there is a token, then until the call has ended. Cancelled while it waits for the token, the call is not
    made. Once the call is made, nothing interrupts it: it keeps its token until it ends, however often the caller is
    cancelled. Then its own result or error comes back, and the cancellation arrives at the next checkpoint.
    """
    # trio promises this of a thread that can't be abandoned; tests/ledger/test_io.py checks that it does.
    return await trio.to_thread.run_sync(call, abandon_on_cancel=False, limiter=limiter)


_BATCH, _SIZES = BatchLimits(), StoreLimits()


@final
@attrs.define(eq=False, repr=False)
class DiskLedger:
    """The engine's memory on disk (``trio_rollout.abc.Ledger``). Made by ``open_ledger``."""

    _store: Store
    _io: RunIO
    _limits: BatchLimits
    _settings: Mapping[str, str]
    _retry_quarantined: bool
    _limiter: trio.CapacityLimiter = attrs.field(factory=partial(trio.CapacityLimiter, 1), init=False)
    _commits: GroupCommit[Transaction] = attrs.field(init=False)
    _begun: bool = attrs.field(default=False, init=False)
    _claimed: bool = attrs.field(default=False, init=False)
    """An engine has it open: a second one would deliver the same groups."""

    def __attrs_post_init__(self) -> None:
        self._commits = GroupCommit(self._write, self._compact, self._limits)

    async def begin(self, identity: RunIdentity) -> Recovered:
        """Bind the ledger to a run and return everything it remembers.

        Blocks while the ledger is read. Cancelled, the ledger may have been bound to the run; nothing else has changed.

        Raises:
          LedgerError: the ledger belongs to another run, is half rescored, or is damaged.
        """
        named = attrs.evolve(identity, settings={**identity.settings, **self._settings})
        begin = partial(self._store.begin, named, retry_quarantined=self._retry_quarantined)
        found = await self._run(begin)
        self._begun = True
        return found

    async def begin_rescoring(self, reward: str, states: Sequence[State] = STATES, *, again: bool = False) -> Rescoring:
        """Begin to score what is stored again with the reward of this name, or go on with that if it was interrupted.

        ``again``: begin anew all the same. Blocks until it is on disk. Cancelled, it may have begun.

        Raises:
          LedgerError: no run has begun, or only some groups would get another reward than the one that the ledger names.
        """
        found = await self._run(partial(self._store.begin_rescoring, reward, states, again=again))
        self._begun = True
        return found

    async def stored_after(self, place: int, number: int, states: Sequence[State], limit: int) -> Sequence[Stored]:
        """Return the next groups that a rescoring has not been through, in the order of their pulls, with their bodies.

        Blocks while they are read. Cancelled, nothing has changed.

        Raises:
          LedgerError: a body is damaged.
        """
        return await self._run(partial(self._store.stored_after, place, number, states, limit))

    async def finish_rescoring(self, number: int) -> None:
        """Note that a rescoring is through with every group. Blocks until it is on disk. Cancelled, it may be noted."""
        await self._run(partial(self._store.finish_rescoring, number))

    def claim(self) -> None:
        """Make this the ledger of one engine, until ``release``.

        Raises:
          LedgerError: another engine has claimed it.
        """
        if self._claimed:
            raise LedgerError(
                f"ledger {self._store.where}: an engine has it open already; a ledger is for one engine at a time"
            )
        self._claimed = True

    def release(self) -> None:
        """Let another engine claim it."""
        self._claimed = False

    async def record(self, events: Sequence[LedgerEvent]) -> None:
        """Write these events in one transaction.

        Blocks until they are on disk. Cancelled before the write was accepted, nothing is written. Cancelled later, this
        waits for the write's end and returns normally.

        Raises:
          DataRefused: the events hold user data that can't be stored; only these events are refused.
          LedgerError: the events contradict what the ledger knows (only these events are refused), or this write or an
            earlier one failed (nothing is written any more).
        """
        if not self._begun:
            raise LedgerError(f"ledger {self._store.where}: nothing can be recorded before begin()")
        transaction = encode_transaction(events)
        await self._commits.submit(transaction, size_of(transaction))

    async def _write(self, batch: Sequence[Transaction]) -> Sequence[LedgerError | None]:
        return await self._run(partial(self._store.commit, batch))

    async def _compact(self) -> None:
        if self._store.needs_compaction:
            await self._run(self._store.compact)
        else:
            await trio.lowlevel.checkpoint()

    async def _run(self, call: Callable[[], T]) -> T:
        return await self._io(call, limiter=self._limiter)

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Hold the store open in this task. A Ctrl-C hits the main task, so it can't keep the store from being closed."""
        await self._run(self._store.open)
        try:
            task_status.started()
            await self._commits.serve()
        finally:
            with trio.CancelScope(shield=True):  # no time limit: a thread can't be left behind
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
    retry_quarantined: bool = False,
    batch: BatchLimits = _BATCH,
    sizes: StoreLimits = _SIZES,
    disk: Disk | None = None,
    io: RunIO = run_io,
) -> AsyncGenerator[DiskLedger]:
    """Open a durable ledger in a directory, which is created if it does not exist.

    ``keep_acked`` keeps acked groups for ``trio-rollout export``; otherwise their space is reclaimed. A ledger belongs to the
    source and the samples per prompt of its first run. ``settings`` names what else must not change between its runs:
    ``{"reward": "exact_match, version 2"}``. ``retry_quarantined`` lets quarantined groups run again when a run begins: with
    new tries, and only the samples that are missing. ``batch`` and ``sizes`` limit commits and files; ``disk`` and ``io`` are for
    simulations. Entering blocks while the files of an earlier run are made consistent. Leaving blocks until an accepted
    write has ended and the database is closed.

    Raises:
      LedgerError: the ledger is in use by a living process, has a newer format, or is damaged.
    """
    require_trio("open_ledger")
    require("path", path, (str, PathLike), "the path of a directory")
    if any(not isinstance(part, str) for item in (settings or {}).items() for part in item):
        raise refuse("settings", settings, "texts by name")
    where = fspath(path)
    store = Store(where=where, disk=disk or RealDisk(Path(where)), keep_acked=keep_acked, limits=sizes)
    ledger = DiskLedger(store, io, batch, settings or {}, retry_quarantined)
    async with open_service(ledger._serve, ledger._leave):
        yield ledger
