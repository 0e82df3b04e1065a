"""read_ledger reads a ledger, also while a run writes it and reclaims or moves the bodies that are read."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import apsw
import attrs
import pytest
import trio

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import Filtered, VersionChanged
from trio_rollout._core.lifecycle import State
from trio_rollout.errors import LedgerError
from trio_rollout.ledger import open_ledger, read_ledger
from trio_rollout.ledger._reader import GroupSummary
from trio_rollout.ledger._store import StoreLimits

from ._samples import (
    BIG,
    IDENTITY,
    acked,
    delivered,
    failure,
    gid,
    group,
    prompt,
    pulled,
    quarantined,
    ready,
    requeued,
)


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """Return a ledger with a group in every state; the acked one is kept."""
    async with open_ledger(tmp_path, keep_acked=True) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(*range(6)), VersionChanged(version=3)])
        await ledger.record([requeued(0), ready(1, size=BIG), ready(2), ready(3)])
        await ledger.record([Filtered(id=gid(4), attempt=1, reason="too easy"), quarantined(5)])
        await ledger.record([delivered(0, 2, 3)])
        await ledger.record([delivered(1, 3)])
        await ledger.record([acked(0, 2)])
    return tmp_path


async def test_summaries_tell_of_every_group(path):
    with read_ledger(path) as reader:
        found = {int(one.id.prompt): one for one in reader.summaries()}
        assert [found[number].state for number in range(6)] == [
            State.WAITING,
            State.READY,
            State.ACKED,
            State.DELIVERED,
            State.FILTERED,
            State.QUARANTINED,
        ]
        blank = GroupSummary(
            id=gid(0),
            state=State.WAITING,
            attempt=1,
            attempts=1,
            step=None,
            cause=Cause.ERROR,
            reason=None,
            oldest_version=None,
            newest_version=None,
            rewards=(),
            error=failure(0),
        )
        assert found[0] == blank
        assert found[1] == attrs.evolve(
            blank,
            id=gid(1),
            state=State.READY,
            attempts=0,
            cause=None,
            oldest_version=7,
            newest_version=7,
            rewards=(1.0,),
            error=None,
        )
        assert (found[2].step, found[3].step, found[4].reason) == (0, 1, "too easy")
        assert (found[5].cause, found[5].attempts, found[5].error) == (Cause.ERROR, 3, failure(5))
        assert [one.id for one in reader.summaries(State.READY, State.ACKED)] == [gid(1), gid(2)]
        assert reader.summary_by_id(gid(4)) == found[4]
        assert reader.summary_by_id(gid(9)) is None


async def test_groups_and_reports_come_whole(path):
    with read_ledger(path) as reader:
        assert list(reader.groups()) == [
            (State.READY, group(1, size=BIG)),
            (State.ACKED, group(2)),
            (State.DELIVERED, group(3)),
        ]
        assert list(reader.groups(State.DELIVERED)) == [(State.DELIVERED, group(3))]
        assert list(reader.groups(State.WAITING)) == []
        assert reader.quarantined() == (quarantined(5).report,)
        assert reader.group_by_id(gid(1)) == group(1, size=BIG)
        assert reader.group_by_id(gid(0)) == prompt(0)
        assert reader.group_by_id(gid(5)) == prompt(5)
        assert reader.group_by_id(gid(4)) is None
        assert reader.group_by_id(gid(9)) is None


async def test_the_run_itself_is_described(path):
    with read_ledger(path) as reader:
        assert reader.identity() == IDENTITY
        assert (reader.next_step(), reader.weight_version()) == (2, 3)
        assert reader.counts() == dict.fromkeys(
            (State.WAITING, State.READY, State.DELIVERED, State.ACKED, State.FILTERED, State.QUARANTINED), 1
        )


async def test_counts_go_on_after_rows_are_gone(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(0, 1), ready(0), Filtered(id=gid(1), attempt=1, reason="no")])
        await ledger.record([delivered(0, 0)])
        await ledger.record([acked(0, 0)])
        with read_ledger(tmp_path) as reader:
            assert list(reader.summaries()) == []
            assert (reader.counts()[State.ACKED], reader.counts()[State.FILTERED]) == (1, 1)


async def test_a_run_that_writes_is_seen_and_not_disturbed(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await ledger.begin(IDENTITY)
        with read_ledger(tmp_path) as reader:
            assert list(reader.summaries()) == []
            await ledger.record([pulled(0), ready(0)])
            assert list(reader.groups()) == [(State.READY, group(0))]
            pages = reader.summaries()
            next(pages)
            await ledger.record([pulled(1)])  # not held up by a reader in the middle of its work
            assert reader.counts()[State.WAITING] == 1


async def test_what_is_reclaimed_or_moved_while_it_is_read_is_looked_up_again(tmp_path):
    """The reader holds a page of rows; meanwhile the run acks most of the groups and empties their segments."""
    count = 20
    async with open_ledger(tmp_path, sizes=StoreLimits(segment=1_200_000)) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(*range(count))])
        for number in range(count):
            await ledger.record([ready(number, size=BIG)])
        with read_ledger(tmp_path) as reader:
            groups = reader.groups()
            assert next(groups)[1].id == gid(0)
            gone = [number for number in range(1, count) if number != 7]
            await ledger.record([delivered(0, *gone)])
            await ledger.record([acked(0, *gone)])
            await ledger.record([])
            await trio.testing.wait_all_tasks_blocked()
            assert list(groups) == [(State.READY, group(7, size=BIG))]


async def test_a_ledger_of_a_killed_run_can_be_read(path):
    """The log of a killed run was never cleaned up."""
    copy = path / "copy"
    async with open_ledger(path) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(7)])
        copy.mkdir()
        for name in ("ledger.db", "ledger.db-wal", "0000000000.seg"):
            (copy / name).write_bytes((path / name).read_bytes())
    with read_ledger(copy) as reader:
        assert reader.counts()[State.WAITING] == 2
        assert reader.group_by_id(gid(1)) == group(1, size=BIG)


async def test_a_damaged_body_is_named(path):
    segment = path / "0000000000.seg"
    segment.write_bytes(bytes(segment.stat().st_size))
    with read_ledger(path) as reader, pytest.raises(LedgerError, match="the body of group 0/1 is damaged or gone"):
        list(reader.groups())


def test_what_is_no_ledger_is_refused(tmp_path):
    with pytest.raises(LedgerError, match=r"is no ledger: it has no ledger\.db"), read_ledger(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    apsw.Connection(str(tmp_path / "ledger.db")).execute("PRAGMA user_version = 1")
    with pytest.raises(LedgerError, match="is empty: its run was stopped"), read_ledger(tmp_path):
        pass
    (tmp_path / "ledger.db").write_bytes(b"no database" * 1000)
    with pytest.raises(LedgerError, match="can't be read"), read_ledger(tmp_path):
        pass


async def test_a_newer_format_is_refused(path):
    db = apsw.Connection(str(path / "ledger.db"))
    db.execute("UPDATE meta SET value = 99 WHERE key = 'format'")
    db.close()
    with pytest.raises(LedgerError, match="has format 99"), read_ledger(path):
        pass


async def test_a_ledger_in_a_read_only_directory_can_be_read(path):
    """In an archived run SQLite can't make the files by which readers and writers share a log."""
    read_an_archive_of(path)


def read_an_archive_of(path: Path) -> None:
    with TemporaryDirectory() as folder:
        archive = Path(folder)
        for entry in path.iterdir():
            (archive / entry.name).write_bytes(entry.read_bytes())
        (archive / "ledger.db-wal").touch()  # as an earlier reader leaves it
        archive.chmod(0o555)
        with ordinary_user(), read_ledger(archive) as reader:
            assert reader.counts()[State.READY] == 1
            assert reader.group_by_id(gid(1)) == group(1, size=BIG)
        archive.chmod(0o755)


@contextmanager
def ordinary_user() -> Generator[None]:
    """Give up root's rights for the block: root can write in a read-only directory."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
