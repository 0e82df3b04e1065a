"""Cancelled at any step of commit, requeue, ack and close: "on disk" and "still mine" exclude each other (P2, P8)."""

from collections.abc import Callable

import attrs
import pytest
import trio

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import LedgerEvent, Recovered
from trio_rollout.errors import LedgerError
from trio_rollout.ledger._open import DiskLedger, open_ledger
from trio_rollout.testing import Arm, Inject, Point, cancel_everywhere
from trio_rollout.testing._sim.disk import SimDisk, disk_full_from
from trio_rollout.testing._sim.files import SimFiles
from trio_rollout.testing._sim.world import SimIO

from ._power_cuts import nothing
from ._samples import IDENTITY, acked, delivered, finished, gid, pulled, ready, requeued, sample
from .test_power_cut import SMALL, store_on

GROUPS = (0, 1, 2)


@attrs.define(eq=False)
class World:
    """The results that the callers of one run got, to be compared with its disk at the end."""

    disk: SimDisk
    written: set[str] = attrs.field(factory=set)
    withdrawn: set[str] = attrs.field(factory=set)
    failed: set[str] = attrs.field(factory=set)

    async def record(self, ledger: DiskLedger, name: str, *events: LedgerEvent) -> bool:
        """Record events and note the result that the caller got."""
        try:
            await ledger.record(events)
        except trio.Cancelled:
            self.withdrawn.add(name)
            raise
        except LedgerError:
            self.failed.add(name)
            return False
        self.written.add(name)
        return True

    def remembered(self) -> Recovered:
        """Return the state after a power cut. Unless a write failed, it does not depend on writes that were never synced."""
        durable = self._open(self.disk.files.after_power_cut(nothing, names=False))
        assert self.failed or durable == self._open(self.disk.files.contents())
        return durable

    def _open(self, contents: dict[str, bytes]) -> Recovered:
        store = store_on(SimDisk(SimFiles.holding(contents)))
        store.open()
        try:
            return store.begin(IDENTITY)
        finally:
            store.close()


async def worker(world: World, ledger: DiskLedger, arm: Arm[World], number: int) -> None:
    """Run one attempt: commit its group; requeue the group if cancelled, shielded, as the engine does."""
    with trio.CancelScope() as scope:
        arm(scope, f"worker {number}")
        try:
            await world.record(ledger, f"commit {number}", ready(number))
        except trio.Cancelled:
            arm.sometimes("a commit was withdrawn")
            with trio.move_on_after(60, shield=True):
                await world.record(ledger, f"requeue {number}", requeued(number, 1, Cause.CANCELLED, attempts=0))
            raise
        if scope.cancel_called:
            arm.sometimes("a cancelled commit was accepted")
        if number == 0 and f"commit {number}" in world.written:
            await world.record(ledger, "delivery", delivered(0, number))
            await world.record(ledger, "ack", acked(0, number))


def size_of(number: int) -> int:
    """Return the tokens of a sample: one of them lies in a segment."""
    return 40 if number == 1 else 0


async def background(world: World, ledger: DiskLedger, arm: Arm[World]) -> None:
    """Write the finished samples of all groups, while the groups settle."""
    with trio.CancelScope() as scope:
        arm(scope, "samples")
        await world.record(ledger, "samples", *(finished(number, size=size_of(number)) for number in GROUPS))


def scenario(full_from: int | None) -> Callable[[Arm[World]], object]:
    async def run(arm: Arm[World]) -> World:
        world = arm.keep(World(SimDisk()))
        with trio.CancelScope() as scope:
            arm(scope, "outside")
            async with open_ledger("sim", disk=world.disk, io=SimIO(), sizes=SMALL) as ledger:
                await ledger.begin(IDENTITY)
                if full_from is not None:
                    world.disk.fault = disk_full_from(len(world.disk.log) + full_from)
                await world.record(ledger, "pull", pulled(*GROUPS))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(background, world, ledger, arm)
                    for number in GROUPS:
                        nursery.start_soon(worker, world, ledger, arm, number)
        world.disk.fault = None
        return world

    return run


def check(world: World, _: Point | None) -> None:
    """Check that every caller was told the truth about the disk."""
    found = world.remembered()
    readies = {group.id for group in found.ready} | {group.id for _, groups in found.delivered for group in groups}
    unfinished = {group.prompt.group_id: group for group in found.unfinished}
    if "pull" not in world.written:
        assert "pull" in world.failed or not unfinished
        return
    for number in GROUPS:
        done = gid(number) in readies or (number == 0 and found.acked == 1)
        assert (gid(number) in unfinished) != done
        assert not {f"commit {number}", f"requeue {number}"} <= world.written, "on disk and requeued"
        if f"commit {number}" in world.written:
            assert done
        if f"commit {number}" in world.withdrawn:
            assert not done
        if f"requeue {number}" in world.written:
            assert unfinished[gid(number)].attempt == 1
        if not done and "samples" not in world.failed:
            kept = (sample(number, size=size_of(number)),) if "samples" in world.written else ()
            assert unfinished[gid(number)].kept == kept
    for name, state in (("delivery", found.next_step == 1), ("ack", found.acked == 1)):
        if name not in world.failed:
            assert state == (name in world.written)


def sweep(seed: int, full_from: int | None, *, sample: int | None) -> None:
    """Cancel every scope at every step, and at ``sample`` steps twice and by Ctrl-C."""
    found = cancel_everywhere(scenario(full_from), check, seed=seed)
    found.require(*(["a commit was withdrawn", "a cancelled commit was accepted"] if full_from is None else []))
    more = [Inject.CANCEL_TWICE, Inject.INTERRUPT]
    cancel_everywhere(scenario(full_from), check, seed=seed, how=more, sample=sample).require()


@pytest.mark.usefixtures("swallowed_by_sqlite")
@pytest.mark.parametrize("full_from", [None, 3, 20])
def test_on_disk_and_requeued_exclude_each_other(full_from: int | None):
    """The rule also holds on a disk that is full from some operation on."""
    sweep(0, full_from, sample=40)


@pytest.mark.soak
@pytest.mark.usefixtures("swallowed_by_sqlite")
@pytest.mark.parametrize("seed", range(1, 9))
def test_on_disk_and_requeued_exclude_each_other_in_every_order(seed: int):
    for full_from in (None, 0, 1, 3, 7, 12, 20, 30, 45, 60):
        sweep(seed, full_from, sample=None)
