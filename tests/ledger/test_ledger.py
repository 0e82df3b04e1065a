"""open_ledger remembers recorded events, refuses events that contradict them, and refuses another run."""

import subprocess
import sys
from pathlib import Path

import apsw
import attrs
import pytest
import trio

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import Filtered, LedgerEvent, Recovered, Restored, VersionChanged
from trio_rollout._core.values import Prompt
from trio_rollout.errors import DataRefused, LedgerError
from trio_rollout.ledger import open_ledger
from trio_rollout.ledger._codec import decode_failure
from trio_rollout.ledger._open import DiskLedger

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
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "demo"


async def record(path: Path, *transactions: list[LedgerEvent]) -> None:
    """Open the ledger once and record these events."""
    async with open_ledger(path) as ledger:
        await ledger.begin(IDENTITY)
        for events in transactions:
            await ledger.record(events)


async def remembered(path: Path) -> Recovered:
    async with open_ledger(path) as ledger:
        return await ledger.begin(IDENTITY)


async def test_a_new_ledger_remembers_nothing(path):
    assert await remembered(path) == Recovered()


async def test_what_was_pulled_and_not_settled_is_unfinished_with_its_counts(path):
    await record(
        path,
        [pulled(0, 1, 2)],
        [requeued(0, 1, attempts=1)],
        [requeued(0, 2, Cause.SERVER_LOST, attempts=1)],
        [requeued(2, 1, Cause.SHUTDOWN, attempts=0)],
    )
    found = await remembered(path)
    assert [(one.prompt, one.attempt, one.attempts) for one in found.unfinished] == [
        (prompt(1), 0, 0),
        (prompt(0), 2, 1),
        (prompt(2), 1, 0),
    ]  # requeued ones wait behind those that were waiting
    assert found.source_state == {"at": 3, "left": [1, None]}


async def test_finished_groups_are_ready_or_delivered_until_they_are_acked(path):
    await record(
        path,
        [pulled(0, 1, 2, 3)],
        [ready(3)],
        [ready(1)],
        [ready(0)],
        [delivered(0, 3)],
        [delivered(1, 1)],
        [acked(0, 3)],
        [VersionChanged(version=5)],
    )
    found = await remembered(path)
    assert found.ready == (group(0),)
    assert found.delivered == ((1, (group(1),)),)
    assert (found.acked, found.acked_step, found.next_step, found.weight_version) == (1, 0, 2, 5)
    assert [one.prompt for one in found.unfinished] == [prompt(2)]


async def test_filtered_and_quarantined_stay_so(path):
    dropped = Filtered(id=gid(0), attempt=1, reason="all rewards equal")
    await record(path, [pulled(0, 1, 2)], [dropped], [quarantined(1)])
    found = await remembered(path)
    assert found.filtered == 1
    assert found.quarantined == (quarantined(1).report,)
    assert [one.prompt for one in found.unfinished] == [prompt(2)]
    with pytest.raises(LedgerError, match="it is quarantined, not waiting"):
        await record(path, [ready(1)])


async def test_a_stale_group_goes_back_to_waiting_from_ready_and_from_delivered(path):
    await record(path, [pulled(0, 1)], [ready(0)], [ready(1)], [delivered(0, 1)])
    await record(path, [requeued(0, 1, Cause.STALE, attempts=0)], [requeued(1, 1, Cause.STALE, attempts=0)])
    found = await remembered(path)
    assert [(one.prompt, one.attempt) for one in found.unfinished] == [(prompt(0), 1), (prompt(1), 1)]
    assert (found.ready, found.delivered, found.next_step) == ((), (), 1)


async def test_a_delivered_group_may_be_delivered_again(path):
    """After a restart or a restore the trainer gets the group again, as the same step or as another one."""
    await record(path, [pulled(0)], [ready(0)], [delivered(0, 0)])
    await record(path, [delivered(1, 0)])
    found = await remembered(path)
    assert found.delivered == ((1, (group(0),)),)
    assert found.next_step == 2
    await record(path, [acked(1, 0)])
    assert (await remembered(path)).acked == 1


async def test_a_restore_makes_delivered_groups_ready_again_in_their_places(path):
    await record(path, [pulled(0, 1, 2)], [ready(2)], [ready(1)], [delivered(0, 2)], [delivered(1, 1)], [ready(0)])
    await record(path, [Restored(step=0, ids=(gid(1),))])
    found = await remembered(path)
    assert found.ready == (group(1), group(0))
    assert found.delivered == ((0, (group(2),)),)
    assert found.next_step == 1
    await record(path, [delivered(1, 1, 0)])
    assert (await remembered(path)).next_step == 2


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (pulled(0), "pull of group 0/0 refused: it was pulled before and is waiting"),
        (ready(9), "commit of group 0/9 refused: the ledger has no such group"),
        (ready(1, 1), "commit of group 0/1 refused: attempt 1 is over, the last was 1"),
        (requeued(1, 1), r"requeue \(error\) of group 0/1 refused: attempt 1 is over"),
        (requeued(2, 2, Cause.STALE), r"requeue \(stale\) of group 0/2 refused: it has attempt 1, not 2"),
        (requeued(2, 2), r"requeue \(error\) of group 0/2 refused: it is ready, not waiting"),
        (ready(2, 2), "commit of group 0/2 refused: it is ready, not waiting"),
        (delivered(5, 0), "delivery as step 5 of group 0/0 refused: it is waiting, not ready or delivered"),
        (acked(0, 2), "ack of step 0 of group 0/2 refused: it is ready, not delivered"),
        (acked(1, 3), "ack of step 1 refused: group 0/3 was delivered as step 0"),
        (Restored(step=0, ids=(gid(2),)), "restore of step 0 of group 0/2 refused: it is ready, not delivered"),
        (acked(0, 4), "ack of step 0 of group 0/4 refused: the ledger has no such group"),
    ],
)
async def test_what_contradicts_the_ledger_is_refused_and_changes_nothing(path, event, why):
    """Old attempts, acks of other groups, repeated acks; the rest of the same transaction is not written either."""
    async with open_ledger(path) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(0, 1, 2, 3, 4), requeued(1), ready(2), ready(3), ready(4)])
        await ledger.record([delivered(0, 3, 4)])
        await ledger.record([acked(0, 4)])
        before = await ledger.begin(IDENTITY)
        with pytest.raises(LedgerError, match=why):
            await ledger.record([VersionChanged(version=9), event])
        assert await ledger.begin(IDENTITY) == before
        await ledger.record([VersionChanged(version=9)])  # the ledger goes on


async def test_data_that_cannot_be_stored_fails_its_own_caller_only(path):
    async with open_ledger(path) as ledger:
        await ledger.begin(IDENTITY)
        bad = attrs.evolve(pulled(1), prompts=(Prompt(id="p", text="x", metadata={"k": object()}),))
        with pytest.raises(DataRefused, match=r"prompt 0/p can't be written to the ledger: metadata\['k'\]"):
            await ledger.record([bad])
        await ledger.record([pulled(1)])


async def test_each_of_many_tasks_gets_the_result_of_its_own_write(path):
    refusals: dict[int, str] = {}

    async def commit(ledger: DiskLedger, number: int) -> None:
        try:
            await ledger.record([ready(number)])
        except LedgerError as error:
            refusals[number] = str(error)

    async with open_ledger(path) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(*range(100))])
        async with trio.open_nursery() as nursery:
            for number in range(101):
                nursery.start_soon(commit, ledger, number)
        assert list(refusals) == [100]
        assert len((await ledger.begin(IDENTITY)).ready) == 100


async def test_large_bodies_lie_in_segments(path):
    await record(path, [pulled(0, 1)], [ready(0, size=BIG)], [ready(1)])
    assert [entry.name for entry in path.glob("*.seg")] == ["0000000000.seg"]
    assert (await remembered(path)).ready == (group(0, size=BIG), group(1))


async def test_a_tail_without_a_row_is_cut(path):
    await record(path, [pulled(0)], [ready(0, size=BIG)])
    segment = path / "0000000000.seg"
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"half a body")
    (path / "0000000007.seg").write_bytes(b"a body whose row was never written")
    (path / "0000000003.dead").write_bytes(b"retired, and the power went")
    assert (await remembered(path)).ready == (group(0, size=BIG),)
    assert segment.stat().st_size == size
    assert sorted(entry.name for entry in path.iterdir()) == ["0000000000.seg", "ledger.db", "lock"]


async def test_a_segment_that_lost_data_is_refused(path):
    await record(path, [pulled(0)], [ready(0, size=BIG)])
    segment = path / "0000000000.seg"
    data = segment.read_bytes()
    segment.write_bytes(data[:-1])
    with pytest.raises(LedgerError, match=rf"has {len(data) - 1} bytes, the ledger needs {len(data)} of them"):
        await remembered(path)
    segment.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(LedgerError, match="fails its checksum"):
        await remembered(path)
    segment.unlink()
    with pytest.raises(LedgerError, match="has 0 bytes"):
        await remembered(path)
    segment.write_bytes(data)
    assert (await remembered(path)).ready == (group(0, size=BIG),)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"source": "other.jsonl"}, "its source is 'prompts.jsonl', this run's is 'other.jsonl'"),
        ({"samples_per_prompt": 8}, "its samples_per_prompt is 2, this run's is 8"),
        ({"settings": {"reward": "v2"}}, "its reward is None, this run's is 'v2'"),
    ],
)
async def test_the_ledger_of_another_run_is_refused(path, change, what):
    await record(path, [pulled(0)])
    async with open_ledger(path) as ledger:
        with pytest.raises(LedgerError, match=f"belongs to another run: {what}. Use another directory"):
            await ledger.begin(attrs.evolve(IDENTITY, **change))
        with pytest.raises(LedgerError, match=r"before begin\(\)"):
            await ledger.record([pulled(1)])
    assert [one.prompt for one in (await remembered(path)).unfinished] == [prompt(0)]


@pytest.mark.parametrize("settings", [{"reward": "exact"}, {"reward": "fuzzy", "stop": "x"}, {"stop": "x"}, {}])
async def test_settings_that_the_user_named_must_stay_the_same(path, settings):
    """Other settings, fewer or more of them are refused; the same ones in another order are accepted."""
    named = {"reward": "exact", "stop": "x"}
    async with open_ledger(path, settings=named) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(0)])
    with pytest.raises(
        LedgerError, match=r"belongs to another run: its (reward is 'exact'|stop is 'x'), this run's is"
    ):
        async with open_ledger(path, settings=settings) as ledger:
            await ledger.begin(IDENTITY)
    async with open_ledger(path, settings=dict(reversed(named.items()))) as ledger:
        assert len((await ledger.begin(IDENTITY)).unfinished) == 1


async def test_a_newer_format_is_refused(path):
    await record(path, [pulled(0)])
    db = apsw.Connection(str(path / "ledger.db"))
    db.execute("UPDATE meta SET value = 99 WHERE key = 'format'")
    db.close()
    with pytest.raises(LedgerError, match="has format 99, this version of trio_rollout reads format 4 and older: use"):
        await remembered(path)


async def test_another_database_is_refused(path):
    path.mkdir(parents=True)
    db = apsw.Connection(str(path / "ledger.db"))
    db.execute("CREATE TABLE users(name)")
    db.close()
    with pytest.raises(LedgerError, match="is no ledger"):
        await remembered(path)
    (path / "ledger.db").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(LedgerError, match=r"opening the ledger failed.*not a database"):
        await remembered(path)


async def test_a_path_that_is_no_directory_is_refused(path):
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match=r"opening the ledger failed.*File exists"):
        await remembered(path)


async def test_a_ledger_in_use_is_refused(path):
    async with open_ledger(path):
        with pytest.raises(LedgerError, match=r"is in use by process \d+: stop that run, or use another directory"):
            await remembered(path)


async def test_a_ledger_in_use_by_another_process_is_refused_until_that_is_gone(path):
    code = (
        "import sys, trio; from trio_rollout.ledger import open_ledger\n"
        "async def main():\n"
        "    async with open_ledger(sys.argv[1]):\n"
        "        print('open', flush=True); await trio.to_thread.run_sync(sys.stdin.read)\n"
        "trio.run(main)"
    )
    with subprocess.Popen(  # ruff: ignore[create-subprocess-in-async-function]  plain, to be killed plainly
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        await trio.to_thread.run_sync(child.stdout.readline)
        with pytest.raises(LedgerError, match=f"is in use by process {child.pid}:"):
            await remembered(path)
        child.kill()
    assert await remembered(path) == Recovered()


async def test_the_bodys_own_exception_comes_out_as_itself(path):
    error = ExceptionGroup("the user's own group", [KeyError(1)])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_ledger(path):
            raise error
    assert caught.value is error


async def test_a_closed_ledger_refuses(path):
    async with open_ledger(path) as ledger:
        await ledger.begin(IDENTITY)
    with pytest.raises(LedgerError, match="is closed"):
        await ledger.record([pulled(0)])


async def test_an_error_of_the_last_attempt_is_kept(path):
    await record(path, [pulled(0), requeued(0)])
    db = apsw.Connection(str(path / "ledger.db"))
    ((error,),) = db.execute("SELECT error FROM groups")
    db.close()
    assert decode_failure(error) == failure(0)
