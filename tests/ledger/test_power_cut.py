"""A disk that drops, reorders and tears what was not synced, under the real storage code (P7)."""

import itertools
import random
from collections.abc import Callable, Iterator

import attrs
import pytest

from trio_rollout._core.ledger_events import Recovered
from trio_rollout.errors import LedgerError
from trio_rollout.ledger import _schema
from trio_rollout.ledger._samples import find_samples, find_turns
from trio_rollout.ledger._store import Store, StoreLimits
from trio_rollout.ledger._transaction import encode_transaction
from trio_rollout.testing._sim.disk import SimDisk
from trio_rollout.testing._sim.files import (
    Mark,
    Op,
    SimFiles,
    Sync,
    SyncNames,
    shuffled,
)

from ._power_cuts import everything, nothing, only_last, replay, torn_at
from ._samples import IDENTITY, pulled, story

SMALL = StoreLimits(inline=250, together=0, segment=1000)


@attrs.frozen
class Memory:
    """The content of a ledger: what a run recovers, and the bytes of every sample and every turn with its group's row."""

    recovered: Recovered
    samples: list[tuple[int, bool, bytes]] = attrs.field(factory=list)
    turns: list[tuple[int, int, bytes]] = attrs.field(factory=list)


def store_on(disk: SimDisk) -> Store:
    return Store(where="sim", disk=disk, limits=SMALL)


def memory_of(store: Store) -> Memory:
    """Return everything that an open ledger remembers; check that its tables and its count of live bytes agree."""
    found, db = store.begin(IDENTITY), store._rows.db
    states = {state for (state,) in db.execute("SELECT state FROM samples LEFT JOIN groups USING (seq)")}
    assert states <= {"waiting", "quarantined"}
    groups = [seq for (seq,) in db.execute("SELECT DISTINCT seq FROM samples ORDER BY seq")]
    samples = [(seq, scored, store._read(body)) for seq in groups for scored, body in find_samples(db, seq)]
    states = {state for (state,) in db.execute("SELECT state FROM turns LEFT JOIN groups USING (seq)")}
    assert states <= {"waiting"}
    groups = [seq for (seq,) in db.execute("SELECT DISTINCT seq FROM turns ORDER BY seq")]
    turns = [(seq, index, store._read(body)) for seq in groups for index, body in find_turns(db, seq)]
    named = {number: live for number, (_, live) in _schema.segments(db).items()}
    assert {number: file.live for number, file in store._segments._files.items() if file.live} == named
    return Memory(found, samples, turns)


@attrs.define
class Told:
    """The promises made to the scenario: after the n-th mark the ledger remembers ``states[n]``."""

    disk: SimDisk
    states: list[Memory]


def live(disk: SimDisk, states: list[Memory]) -> None:
    """Run a life of a ledger with every kind of event, and the beginning of the next; mark the log at every promise."""
    for number in range(2):
        store = store_on(disk)
        store.open()
        try:
            store.begin(IDENTITY)
            for batch in itertools.islice(story(first=number * 10, step=number * 3), 4 if number else None):
                assert store.commit([encode_transaction(events) for events in batch]) == [None] * len(batch)
                states.append(memory_of(store))
                disk.mark(len(states) - 1)
                store.compact()
        finally:
            store.close()


@pytest.fixture(scope="module")
def told() -> Told:
    found = Told(SimDisk(), [Memory(Recovered())])
    live(found.disk, found.states)
    return found


def images(files: SimFiles, rng: random.Random) -> Iterator[dict[str, bytes]]:
    """Yield the files that a power cut may leave, with the writes in every kind of disorder."""
    for names in (True, False):
        for choose in (nothing, everything, only_last, shuffled(rng)):
            yield files.after_power_cut(choose, names=names)


def torn_images(files: SimFiles, *, bytes_apart: int) -> Iterator[dict[str, bytes]]:
    """Yield the files after a cut in the middle of a write: at every byte of a segment, every ``bytes_apart`` of the log."""
    unsynced = files.unsynced()
    tail = sum(len(data or b"") for edits in unsynced.values() for _, data in edits)
    apart = 1 if any(name.endswith(".seg") for name in unsynced) else bytes_apart
    for length in range(0, tail, apart):
        yield files.after_power_cut(torn_at(length), names=True)


def remembered(image: dict[str, bytes], *, go_on: bool) -> Memory:
    """Return the state of a ledger that finds these files; with ``go_on`` check that it accepts more."""
    disk = SimDisk(SimFiles.holding(image))
    store = store_on(disk)
    store.open()
    try:
        found = memory_of(store)
    finally:
        store.close()
    if go_on:
        store.open()
        try:
            assert memory_of(store) == found
            assert store.commit([encode_transaction([pulled(99)])]) == [None]
            assert store.begin(IDENTITY).unfinished[-1].prompt.id == "99"
        finally:
            store.close()
    return found


def following(log: list[Op], index: int) -> Op | None:
    """Return the operation that the power cut prevented; None after the last one."""
    return log[index] if index < len(log) else None


def broken_promises(
    told: Told, *, deaf: Callable[[Op], bool] | None = None, bytes_apart: int | None, begin: int = 0
) -> Iterator[str]:
    """Cut the power before every operation from ``begin`` on, in many ways; yield each broken promise."""
    rng = random.Random(7)
    promised = 0
    seen: set[tuple[int, int]] = set()
    for index, files in replay(told.disk.log, deaf=deaf):
        if index and isinstance(mark := told.disk.log[index - 1], Mark):
            promised = mark.number
        if index < begin:
            continue
        found = images(files, rng)
        if bytes_apart is not None and isinstance(following(told.disk.log, index), Sync):
            found = itertools.chain(found, torn_images(files, bytes_apart=bytes_apart))  # as long as the tail gets
        for image in found:
            key = (promised, hash(tuple(sorted(image.items()))))
            if key in seen:
                continue
            seen.add(key)
            try:
                state = remembered(image, go_on=len(seen) % 16 == 0)
            except LedgerError as error:
                yield f"operation {index}: {error}"
            else:
                if state not in told.states[promised : promised + 2]:
                    yield f"operation {index}: not what was promised at mark {promised}"


@pytest.mark.parametrize("bytes_apart", [509, pytest.param(1, marks=pytest.mark.soak)])
def test_a_power_cut_anywhere_loses_nothing_that_was_promised(told, bytes_apart):
    """At every operation of commit, requeue, compaction, checkpoint, open and close; at every byte of an unsynced segment."""
    assert next(broken_promises(told, bytes_apart=bytes_apart), None) is None


def names_after_segment() -> Callable[[Op], bool]:
    before: list[Op] = []

    def deaf(op: Op) -> bool:
        after = before and isinstance(before[-1], Sync) and before[-1].name.endswith(".seg")
        before.append(op)
        return bool(after) and isinstance(op, SyncNames)

    return deaf


def sync_of(ending: str) -> Callable[[Op], bool]:
    return lambda op: isinstance(op, Sync) and op.name.endswith(ending)


@pytest.mark.parametrize(
    "deaf",
    [
        pytest.param(sync_of(".seg"), id="segment"),
        pytest.param(names_after_segment(), id="name of a new segment"),
        pytest.param(sync_of("-wal"), id="log"),
        pytest.param(sync_of(".db"), id="database"),
    ],
)
def test_without_one_of_the_syncs_a_power_cut_is_noticed(told, deaf):
    """The test above fails when a sync is missing from the code."""
    assert next(broken_promises(told, deaf=deaf, bytes_apart=None), None) is not None
