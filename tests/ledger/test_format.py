"""A ledger of an older format is brought up to date by a run, in one transaction, and read as it is by a reader."""

import re
from pathlib import Path

import apsw
import pytest

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import Recovered, Unfinished
from trio_rollout._core.lifecycle import State
from trio_rollout.ledger import GroupSamples, open_ledger, read_ledger
from trio_rollout.testing._sim.disk import SimDisk

from ._power_cuts import everything, nothing, replay
from ._samples import IDENTITY, delivered, finished, gid, group, prompt, quarantined, requeued, sample
from .test_power_cut import Told, broken_promises, memory_of, store_on

FORMAT_1 = Path(__file__).parent / "format_1"
SEGMENT = "0000000001.seg"
REMEMBERED = Recovered(
    source_state={"at": 22, "left": [1, None]},
    unfinished=(
        Unfinished(prompt=prompt(2), attempt=2, attempts=1, unpenalized=0),
        Unfinished(prompt=prompt(20), attempt=1, attempts=1, unpenalized=0),
    ),
    ready=(group(5), group(21, size=60)),
    delivered=((1, (group(1),)),),
    quarantined=(quarantined(4).report,),
    filtered=1,
    acked=1,
    next_step=2,
    weight_version=1,
    acked_step=0,
)


def fill(db: apsw.Connection) -> None:
    """Make the database of format 1, with the settings of the version that wrote it."""
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL").fetchall()
    db.execute("PRAGMA synchronous = FULL")
    db.execute((FORMAT_1 / "ledger.sql").read_text(encoding="utf-8"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    db = apsw.Connection(str(tmp_path / "ledger.db"))
    fill(db)
    db.close()
    (tmp_path / SEGMENT).write_bytes((FORMAT_1 / SEGMENT).read_bytes())
    return tmp_path


def format_of(db: apsw.Connection) -> int:
    """Return the format of a database; everything in it must be of that format."""
    ((found,),) = db.execute("SELECT value FROM meta WHERE key = 'format'")
    columns = {name for (name,) in db.execute("SELECT name FROM pragma_table_info('groups')")}
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
    assert ("counts" in columns) == ("samples" in tables) == ("samples_by_segment" in tables) == (found == 2)
    return int(found)


def format_in(path: Path) -> int:
    db = apsw.Connection(str(path / "ledger.db"))
    try:
        return format_of(db)
    finally:
        db.close()


async def test_a_run_goes_on_with_a_ledger_of_an_older_format(path):
    async with open_ledger(path) as ledger:
        assert await ledger.begin(IDENTITY) == REMEMBERED
        await ledger.record([finished(2, 1, attempt=3), finished(20, size=200)])
        await ledger.record([requeued(5, 1, Cause.STALE, attempts=0), finished(5)])
        await ledger.record([delivered(2, 21)])
    assert format_in(path) == 2
    async with open_ledger(path) as ledger:
        found = await ledger.begin(IDENTITY)
    assert [one.kept for one in found.unfinished] == [(sample(2, 1, 3),), (sample(20, size=200),), (sample(5),)]
    assert found.delivered == (*REMEMBERED.delivered, (2, (group(21, size=60),)))


async def test_it_then_has_the_tables_of_a_new_one(path, tmp_path):
    for where in (path, tmp_path / "new"):
        async with open_ledger(where) as ledger:
            await ledger.begin(IDENTITY)

    def tables(where: Path) -> list[tuple[str, str]]:
        db = apsw.Connection(str(where / "ledger.db"))
        try:
            found = list(db.execute("SELECT name, sql FROM sqlite_schema ORDER BY type, name"))
        finally:
            db.close()
        return [(name, re.sub(r"--.*", "", sql or "")) for name, sql in found]

    assert tables(path) == tables(tmp_path / "new")


async def test_a_reader_reads_it_as_it_is(path):
    """Also while a run brings it up to date; the samples that the run writes are for the next reader."""
    with read_ledger(path) as reader:
        assert [(one.state, one.kept) for one in reader.summaries(State.WAITING)] == [(State.WAITING, 0)] * 2
        assert reader.samples(gid(2)) == reader.samples(gid(4)) == GroupSamples()
        assert reader.quarantined() == REMEMBERED.quarantined
        assert format_in(path) == 1
        async with open_ledger(path) as ledger:
            await ledger.begin(IDENTITY)
            await ledger.record([finished(2)])
            assert [body for _, body in reader.groups(State.READY)] == list(REMEMBERED.ready)
            assert reader.samples(gid(2)) == GroupSamples()
            with read_ledger(path) as later:
                assert later.samples(gid(2)).kept == (sample(2),)


def migrated() -> tuple[Told, int]:
    """Return what a disk went through that got a ledger of format 1 and was then opened, and when it was opened."""
    disk = SimDisk()
    disk.write(SEGMENT, 0, [(FORMAT_1 / SEGMENT).read_bytes()])
    disk.sync(SEGMENT)
    disk.sync_names()
    disk.lock()
    db = disk.connect()
    fill(db)
    db.close()
    disk.unlock()
    told, opened = Told(disk, [(Recovered(), []), (REMEMBERED, [])]), len(disk.log)
    disk.mark(1)
    store = store_on(disk)
    store.open()
    try:
        assert memory_of(store) == told.states[1]
    finally:
        store.close()
    return told, opened


def test_a_power_cut_while_a_ledger_is_brought_up_to_date_loses_nothing():
    told, _ = migrated()
    assert next(broken_promises(told, bytes_apart=509), None) is None


def test_a_power_cut_leaves_the_old_format_or_the_new_one():
    """And both are seen, so the cuts are where they matter."""
    told, opened = migrated()
    found = set()
    for index, files in replay(told.disk.log):
        if index < opened:
            continue
        for choose in (nothing, everything):
            disk = SimDisk(type(files).holding(files.after_power_cut(choose, names=True)))
            db = disk.connect()
            found.add(format_of(db))
            db.close()
            disk.unlock()
    assert found == {1, 2}
