"""A ledger of an older format is brought up to date by a run, in one transaction, and read as it is by a reader."""

import re
from pathlib import Path

import apsw
import attrs
import pytest

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import Recovered, Unfinished
from trio_rollout._core.lifecycle import State
from trio_rollout._core.samples import SampleCounts
from trio_rollout.ledger import GroupSamples, open_ledger, read_ledger
from trio_rollout.ledger._schema import FORMAT
from trio_rollout.testing._sim.disk import SimDisk

from ._power_cuts import everything, nothing, replay
from ._samples import IDENTITY, delivered, finished, gid, group, prompt, quarantined, recorded, requeued, sample, turn
from .test_power_cut import Memory, Told, broken_promises, memory_of, store_on

HERE = Path(__file__).parent
COUNTS = (SampleCounts(1, 0, 2), SampleCounts(0, 0, 1))
REMEMBERED = {
    1: Recovered(
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
    ),
    2: Recovered(
        source_state={"at": 21, "left": [1, None]},
        unfinished=(
            Unfinished(prompt=prompt(5), attempt=0, attempts=0, unpenalized=0, kept=(sample(5),)),
            Unfinished(
                prompt=prompt(20), attempt=1, attempts=1, unpenalized=0, samples=COUNTS, kept=(sample(20, size=40),)
            ),
        ),
        ready=(group(1), group(2, 2, size=40)),
        quarantined=(quarantined(4).report,),
        filtered=1,
        acked=1,
        next_step=1,
        weight_version=0,
        acked_step=0,
    ),
}
"""What a run finds in each of the old ledgers."""
REMEMBERED[3] = attrs.evolve(
    REMEMBERED[2],
    unfinished=(
        REMEMBERED[2].unfinished[0],
        attrs.evolve(REMEMBERED[2].unfinished[1], wasted={Cause.ERROR: 7}),
    ),
)
QUARANTINED = {
    1: GroupSamples(),
    2: GroupSamples(kept=(sample(4, size=40), sample(4, 1)), unscored=(sample(4, 2), sample(4, 3, size=40))),
}
QUARANTINED[3] = QUARANTINED[2]


def segments(old: int) -> list[Path]:
    return sorted((HERE / f"format_{old}").glob("*.seg"))


def fill(db: apsw.Connection, old: int) -> None:
    """Make the database of an old format, with the settings of the version that wrote it."""
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL").fetchall()
    db.execute("PRAGMA synchronous = FULL")
    db.execute((HERE / f"format_{old}" / "ledger.sql").read_text(encoding="utf-8"))


@pytest.fixture(params=REMEMBERED)
def old(request: pytest.FixtureRequest) -> int:
    """Each old format."""
    return int(request.param)


@pytest.fixture
def path(tmp_path: Path, old: int) -> Path:
    db = apsw.Connection(str(tmp_path / "ledger.db"))
    fill(db, old)
    db.close()
    for segment in segments(old):
        (tmp_path / segment.name).write_bytes(segment.read_bytes())
    return tmp_path


def format_of(db: apsw.Connection) -> int:
    """Return the format of a database; everything in it must be of that format."""
    ((found,),) = db.execute("SELECT value FROM meta WHERE key = 'format'")
    columns = {name for (name,) in db.execute("SELECT name FROM pragma_table_info('groups')")}
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
    assert ("counts" in columns) == ("samples" in tables) == ("samples_by_segment" in tables) == (found >= 2)
    assert ("rescored" in columns) == ("ended" in tables) == (found >= 3)
    assert ("turns" in tables) == ("turns_by_segment" in tables) == (found >= 4)
    return int(found)


def format_in(path: Path) -> int:
    db = apsw.Connection(str(path / "ledger.db"))
    try:
        return format_of(db)
    finally:
        db.close()


async def test_a_run_goes_on_with_a_ledger_of_an_older_format(path, old):
    was = REMEMBERED[old]
    waiting, ready = [one.prompt for one in was.unfinished], was.ready[0].id.prompt
    first, last = (int(one.id) for one in waiting)
    async with open_ledger(path) as ledger:
        assert await ledger.begin(IDENTITY) == was
        await ledger.record([finished(first, 1, attempt=3), finished(last, size=200), recorded(last, 1)])
        await ledger.record([requeued(int(ready), 1, Cause.STALE, attempts=0), finished(int(ready))])
        await ledger.record([delivered(2, int(was.ready[1].id.prompt))])
    assert format_in(path) == FORMAT
    async with open_ledger(path) as ledger:
        found = await ledger.begin(IDENTITY)
    assert [one.prompt for one in found.unfinished] == [*waiting, prompt(int(ready))]
    kept = [*was.unfinished[0].kept, sample(first, 1, 3)], [sample(last, size=200)], [sample(int(ready))]
    assert [list(one.kept) for one in found.unfinished] == list(kept)
    assert [one.turns for one in found.unfinished] == [{}, {1: (turn(),)}, {}]
    assert found.delivered == (*was.delivered, (2, (was.ready[1],)))


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


async def test_a_reader_reads_it_as_it_is(path, old):
    """Also while a run brings it up to date; what is new in the format is for the next reader."""
    was = REMEMBERED[old]
    with read_ledger(path) as reader:
        kept = [(one.state, one.kept) for one in reader.summaries(State.WAITING)]
        assert kept == [(State.WAITING, len(one.kept)) for one in was.unfinished]
        assert reader.samples(gid(4)) == QUARANTINED[old]
        assert reader.quarantined() == was.quarantined
        assert format_in(path) == old
        async with open_ledger(path) as ledger:
            await ledger.begin(IDENTITY)
            await ledger.record([finished(20)])
            assert [body for _, body in reader.groups(State.READY)] == list(was.ready)
            assert reader.samples(gid(4)) == QUARANTINED[old]
            with read_ledger(path) as later:
                assert later.samples(gid(20)).kept == (sample(20),)


def migrated(old: int) -> tuple[Told, int]:
    """Return what a disk went through that got a ledger of an old format and was then opened, and when it was opened."""
    disk = SimDisk()
    for segment in segments(old):
        disk.write(segment.name, 0, [segment.read_bytes()])
        disk.sync(segment.name)
    disk.sync_names()
    disk.lock()
    db = disk.connect()
    fill(db, old)
    db.close()
    disk.unlock()
    opened = len(disk.log)
    disk.mark(1)
    store = store_on(disk)
    store.open()
    try:
        memory = memory_of(store)
    finally:
        store.close()
    assert memory.recovered == REMEMBERED[old]
    return Told(disk, [Memory(Recovered()), memory]), opened


def test_a_power_cut_while_a_ledger_is_brought_up_to_date_loses_nothing(old):
    told, opened = migrated(old)
    assert next(broken_promises(told, bytes_apart=509, begin=opened), None) is None


def test_a_power_cut_leaves_the_old_format_or_the_new_one(old):
    """And both are seen, so the cuts are where they matter."""
    told, opened = migrated(old)
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
    assert found == {old, FORMAT}
