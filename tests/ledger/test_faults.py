"""A full or failing disk at any write: no false commit, no corruption, and a restart resumes."""

import errno
from collections.abc import Callable

import apsw
import pytest

from trio_rollout._core.ledger_events import Recovered
from trio_rollout.errors import LedgerError
from trio_rollout.ledger._store import Store
from trio_rollout.ledger._transaction import encode_transaction
from trio_rollout.testing._sim.disk import Fault, SimDisk, disk_full_from, failing_at
from trio_rollout.testing._sim.files import SimFiles

from ._power_cuts import nothing
from ._samples import IDENTITY, pulled, ready, story
from .test_power_cut import Memory, memory_of, store_on


def life(store: Store, states: list[Memory]) -> None:
    """Run one life of a ledger; append to ``states`` with every promise."""
    store.open()
    try:
        store.begin(IDENTITY)
        for batch in story():
            assert store.commit([encode_transaction(events) for events in batch]) == [None] * len(batch)
            states.append(memory_of(store))
            store.compact()
    finally:
        store.close()


@pytest.fixture(scope="module")
def healthy() -> tuple[list[Memory], int]:
    states, disk = [Memory(Recovered())], SimDisk()
    life(store_on(disk), states)
    return states, len(disk.log)


def failure_of(store: Store, promised: list[Memory]) -> LedgerError | None:
    """Return the error that a life of a ledger ended with; it must name the disk's error."""
    try:
        life(store, promised)
    except LedgerError as error:
        if not isinstance(error.__cause__, OSError | apsw.Error):
            raise
        return error
    return None


def check_after(contents: dict[str, bytes], allowed: list[Memory]) -> None:
    """Check that a ledger on these files and a working disk remembers one of these states and accepts more."""
    store = store_on(SimDisk(SimFiles.holding(contents)))
    store.open()
    try:
        assert memory_of(store) in allowed
        assert store.commit([encode_transaction([pulled(99)])]) == [None]
    finally:
        store.close()


@pytest.mark.usefixtures("swallowed_by_sqlite")
@pytest.mark.parametrize("fault", [disk_full_from, failing_at])
def test_a_fault_at_any_operation(healthy: tuple[list[Memory], int], fault: Callable[[int], Fault]):
    """After the error nothing is written any more; the promised writes are there, and at most the one that failed."""
    states, operations = healthy
    raised = 0
    for number in range(operations):
        disk, promised = SimDisk(fault=fault(number)), [Memory(Recovered())]
        store = store_on(disk)
        error = failure_of(store, promised)
        raised += error is not None
        if error is not None and store._broken is not None:
            with pytest.raises(LedgerError) as later:
                store.commit([encode_transaction([pulled(50)])])
            assert later.value.__cause__ is error.__cause__
        assert promised == states[: len(promised)]
        allowed = states[len(promised) - 1 : len(promised) + 1]
        check_after(disk.files.contents(), allowed)
        check_after(disk.files.after_power_cut(nothing, names=False), allowed)
    assert (
        raised > operations * 0.5
    )  # the rest hit work that SQLite may fail at without harm, such as cleaning up its log


def test_a_full_disk_is_named():
    """The message says which ledger, what failed and what to do."""
    disk = SimDisk()
    store = store_on(disk)
    store.open()
    store.begin(IDENTITY)
    disk.fault = disk_full_from(0)
    with pytest.raises(
        LedgerError, match=r"ledger sim: writing a batch of 1 failed.*disk is full: free some space"
    ) as caught:
        store.commit([encode_transaction([pulled(1)])])
    assert isinstance(caught.value.__cause__, OSError | apsw.FullError)
    store.close()


def test_a_full_disk_is_named_when_a_segment_does_not_fit():
    disk = SimDisk()
    store = store_on(disk)
    store.open()
    store.begin(IDENTITY)
    store.commit([encode_transaction([pulled(7)])])
    disk.fault = disk_full_from(0)
    with pytest.raises(LedgerError, match="free some space") as caught:
        store.commit([encode_transaction([ready(7)])])
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    store.close()
