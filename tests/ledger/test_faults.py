"""A full or failing disk at any write: nothing pretends to be committed, nothing is corrupt, a restart goes on."""

import errno
from collections.abc import Callable

import apsw
import pytest

from trio_rollout._core.events import Recovered
from trio_rollout.errors import LedgerError
from trio_rollout.ledger._records import record_of
from trio_rollout.ledger._store import Store
from trio_rollout.testing._sim.disk import Fault, SimDisk, disk_full_from, failing_at
from trio_rollout.testing._sim.files import SimFiles, nothing

from ._samples import IDENTITY, pulled, ready, story
from .test_power_cut import store_on


def life(store: Store, states: list[Recovered]) -> None:
    """One life of a ledger; ``states`` grows with every promise."""
    store.open()
    try:
        store.begin(IDENTITY)
        for batch in story():
            assert store.commit([record_of(events) for events in batch]) == [None] * len(batch)
            states.append(store.begin(IDENTITY))
            store.tidy()
    finally:
        store.close()


@pytest.fixture(scope="module")
def healthy() -> tuple[list[Recovered], int]:
    states, disk = [Recovered()], SimDisk()
    life(store_on(disk), states)
    return states, len(disk.log)


def failure_of(store: Store, promised: list[Recovered]) -> LedgerError | None:
    """What a life of a ledger ended with; it must name the disk's error."""
    try:
        life(store, promised)
    except LedgerError as error:
        if not isinstance(error.__cause__, OSError | apsw.Error):
            raise
        return error
    return None


def check_after(contents: dict[str, bytes], allowed: list[Recovered]) -> None:
    """With these files and a disk that works again, the ledger remembers one of these and takes more."""
    store = store_on(SimDisk(SimFiles.holding(contents)))
    store.open()
    try:
        assert store.begin(IDENTITY) in allowed
        assert store.commit([record_of([pulled(99)])]) == [None]
    finally:
        store.close()


@pytest.mark.usefixtures("swallowed_by_sqlite")
@pytest.mark.parametrize("fault", [disk_full_from, failing_at])
def test_a_fault_at_any_operation(healthy: tuple[list[Recovered], int], fault: Callable[[int], Fault]):
    """After the error nothing is written any more; what was promised is there, and at most the write that failed."""
    states, operations = healthy
    raised = 0
    for number in range(operations):
        disk, promised = SimDisk(fault=fault(number)), [Recovered()]
        store = store_on(disk)
        error = failure_of(store, promised)
        raised += error is not None
        if error is not None and store._broken is not None:
            with pytest.raises(LedgerError) as later:
                store.commit([record_of([pulled(50)])])
            assert later.value.__cause__ is error.__cause__
        assert promised == states[: len(promised)]
        allowed = states[len(promised) - 1 : len(promised) + 1]
        check_after(disk.files.contents(), allowed)
        check_after(disk.files.after_power_cut(nothing, names=False), allowed)
    assert raised > operations * 0.5  # the rest hit what SQLite may fail at without harm, such as tidying its log


def test_a_full_disk_is_named():
    """The message says which ledger, what failed and what to do."""
    disk = SimDisk()
    store = store_on(disk)
    store.open()
    store.begin(IDENTITY)
    disk.fault = disk_full_from(0)
    with pytest.raises(LedgerError, match=r"ledger sim: writing 1 records failed.*disk is full: make room") as caught:
        store.commit([record_of([pulled(1)])])
    assert isinstance(caught.value.__cause__, OSError | apsw.FullError)
    store.close()


def test_a_full_disk_is_named_when_a_segment_does_not_fit():
    disk = SimDisk()
    store = store_on(disk)
    store.open()
    store.begin(IDENTITY)
    store.commit([record_of([pulled(7)])])
    disk.fault = disk_full_from(0)
    with pytest.raises(LedgerError, match="make room") as caught:
        store.commit([record_of([ready(7)])])
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    store.close()
