"""Finished samples: kept while their group is not settled, ignored when they come too late, gone with their group."""

from pathlib import Path

import apsw
import attrs
import pytest

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import Filtered, LedgerEvent, SampleKept, Unfinished
from trio_rollout._core.lifecycle import State
from trio_rollout._core.samples import SampleCounts
from trio_rollout._core.values import GroupId, Prompt, Trajectory
from trio_rollout.errors import DataRefused, LedgerError
from trio_rollout.ledger import GroupSamples, _reader, open_ledger, read_ledger
from trio_rollout.ledger._codec import decode_sample, encode_sample
from trio_rollout.ledger._location import InSegment, Location
from trio_rollout.ledger._samples import find_samples
from trio_rollout.ledger._store import StoreLimits

from ._samples import (
    BIG,
    IDENTITY,
    acked,
    delivered,
    dropped,
    finished,
    gid,
    prompt,
    pulled,
    quarantined,
    ready,
    requeued,
    sample,
)


async def record(path: Path, *records: list[LedgerEvent], keep_acked: bool = False) -> None:
    """Record these in one opening of the ledger."""
    async with open_ledger(path, keep_acked=keep_acked) as ledger:
        await ledger.begin(IDENTITY)
        for events in records:
            await ledger.record(events)


async def unfinished(path: Path) -> tuple[Unfinished, ...]:
    async with open_ledger(path) as ledger:
        return (await ledger.begin(IDENTITY)).unfinished


async def kept(path: Path) -> tuple[Trajectory, ...]:
    """The kept samples of the only unfinished group."""
    (one,) = await unfinished(path)
    return one.kept


def stored(path: Path, number: int = 0) -> GroupSamples:
    with read_ledger(path) as reader:
        return reader.samples(gid(number))


def stored_rows(path: Path) -> int:
    """Return the number of samples in the database, whichever group they are of."""
    db = apsw.Connection(str(path / "ledger.db"))
    try:
        ((count,),) = db.execute("SELECT count(*) FROM samples")
        return count
    finally:
        db.close()


async def test_a_restart_finds_the_samples_that_were_finished(tmp_path):
    """One record holds samples of many groups, of any attempt; they come back by index."""
    await record(tmp_path, [pulled(0, 1, 2)], [finished(0, 1), finished(2), finished(0, 0, size=BIG)])
    assert [(one.prompt, one.kept) for one in await unfinished(tmp_path)] == [
        (prompt(0), (sample(0, 0, size=BIG), sample(0, 1))),
        (prompt(1), ()),
        (prompt(2), (sample(2),)),
    ]
    assert [entry.name for entry in tmp_path.glob("*.seg")] == ["0000000000.seg"]


async def test_a_requeue_keeps_the_samples_and_records_the_tries_of_each(tmp_path):
    counts = (SampleCounts(1, 0), SampleCounts(0, 7))
    await record(tmp_path, [pulled(0)], [finished(0), requeued(0, 1, Cause.DEADLINE, samples=counts)])
    (one,) = await unfinished(tmp_path)
    assert (one.samples, one.kept, one.attempt) == (counts, (sample(0),), 1)
    await record(tmp_path, [requeued(0, 2, Cause.DEADLINE)])
    (one,) = await unfinished(tmp_path)
    assert (one.samples, one.kept, one.attempt) == ((), (sample(0),), 2)


async def test_a_sample_of_an_older_attempt_is_kept_unless_a_newer_one_is(tmp_path):
    await record(tmp_path, [pulled(0)], [requeued(0, 1)], [finished(0, 0, attempt=1), finished(0, 1, attempt=2)])
    assert await kept(tmp_path) == (sample(0, 0, 1), sample(0, 1, 2))
    await record(tmp_path, [finished(0, 0, attempt=2), finished(0, 1, attempt=1)])
    assert await kept(tmp_path) == (sample(0, 0, 2), sample(0, 1, 2))
    again = attrs.evolve(sample(0, 0, 2), reward=0.75)
    await record(tmp_path, [SampleKept(id=gid(0), attempt=2, trajectory=again)])
    assert await kept(tmp_path) == (again, sample(0, 1, 2))


async def test_dropped_samples_are_gone(tmp_path):
    """Those that are not kept, and those of a settled or unknown group, are ignored."""
    await record(tmp_path, [pulled(0), finished(0, 0), finished(0, 1), finished(0, 2, size=BIG)])
    await record(tmp_path, [dropped(0, 1, 2, 5), dropped(7, 0)])
    assert await kept(tmp_path) == (sample(0),)
    await record(tmp_path, [quarantined(0)], [dropped(0, 0)])
    assert stored(tmp_path).kept == (sample(0),)


async def test_a_ready_group_has_its_samples_in_its_body(tmp_path):
    await record(tmp_path, [pulled(0)], [finished(0), finished(0, 1, size=BIG), requeued(0, 1)], [ready(0, 2)])
    assert await unfinished(tmp_path) == ()
    assert stored(tmp_path) == GroupSamples()
    assert stored_rows(tmp_path) == 0


async def test_a_stale_group_keeps_the_samples_that_are_recorded_with_its_requeue(tmp_path):
    """Those that are not are sampled again."""
    await record(tmp_path, [pulled(0), finished(0, 0), finished(0, 1), ready(0)], [delivered(0, 0)])
    with pytest.raises(LedgerError, match="it has attempt 1, not 2"):
        await record(tmp_path, [requeued(0, 2, Cause.STALE, attempts=0), finished(0, 1)])
    assert stored(tmp_path) == GroupSamples()
    await record(tmp_path, [requeued(0, 1, Cause.STALE, attempts=0), finished(0, 1)])
    assert await kept(tmp_path) == (sample(0, 1),)


async def test_a_quarantined_group_keeps_its_samples_and_those_that_were_not_scored(tmp_path):
    unscored = (attrs.evolve(sample(0, 2), reward=None), attrs.evolve(sample(0, 3, size=BIG), reward=None))
    await record(tmp_path, [pulled(0)], [finished(0, 1), finished(0, 0)], [quarantined(0, *unscored)])
    assert stored(tmp_path) == GroupSamples(kept=(sample(0, 0), sample(0, 1)), unscored=unscored)
    async with open_ledger(tmp_path) as ledger:
        found = await ledger.begin(IDENTITY)
    assert (found.quarantined, found.unfinished) == ((quarantined(0).report,), ())


SETTLED: dict[str, list[list[LedgerEvent]]] = {
    "ready": [[ready(0)]],
    "delivered": [[ready(0)], [delivered(0, 0)]],
    "acked": [[ready(0)], [delivered(0, 0)], [acked(0, 0)]],
    "filtered": [[Filtered(id=gid(0), attempt=1, reason="too easy")]],
    "quarantined": [[quarantined(0)]],
    "never pulled": [],
}


@pytest.mark.parametrize("keep_acked", [True, False])
@pytest.mark.parametrize("state", SETTLED)
async def test_a_sample_that_comes_after_its_group_has_settled_is_ignored(tmp_path, state, keep_acked):
    """The other events of its record are written, its body takes no space for long, and the ledger goes on."""
    number = 9 if state == "never pulled" else 0
    await record(tmp_path, [pulled(0, 1)], *SETTLED[state], keep_acked=keep_acked)
    await record(tmp_path, [finished(number, size=BIG), finished(1), finished(number, 1)], keep_acked=keep_acked)
    found = {one.prompt.id: one.kept for one in await unfinished(tmp_path)}
    assert found.pop("1") == (sample(1),)
    assert found == ({"0": ()} if state == "never pulled" else {})
    assert stored(tmp_path, number) == GroupSamples()
    assert sum(entry.stat().st_size for entry in tmp_path.glob("*.seg")) == 0


@pytest.mark.parametrize("state", ["ready", "filtered"])
@pytest.mark.parametrize("keep_acked", [True, False])
async def test_samples_go_in_the_transaction_that_settles_their_group(tmp_path, state, keep_acked):
    """If that is refused, they stay."""
    settle = SETTLED[state][0]
    await record(tmp_path, [pulled(0)], [finished(0), finished(0, 1, size=BIG)])
    with pytest.raises(LedgerError, match="never pulled"):
        await record(tmp_path, [*settle, ready(9)])
    assert await kept(tmp_path) == (sample(0), sample(0, 1, size=BIG))
    await record(tmp_path, settle, keep_acked=keep_acked)
    assert await unfinished(tmp_path) == ()
    assert stored_rows(tmp_path) == 0


async def test_a_sample_that_cannot_be_stored_names_its_group(tmp_path):
    """The engine leaves that group's samples out and records the others again."""
    bad = attrs.evolve(finished(1), trajectory=attrs.evolve(sample(1), metadata={"k": object()}))
    with pytest.raises(DataRefused, match=r"sample 0 of group 0/1 can't be written.*metadata\['k'\]") as caught:
        await record(tmp_path, [pulled(0, 1)], [finished(0), bad])
    assert caught.value.group == gid(1)
    assert [one.kept for one in await unfinished(tmp_path)] == [(), ()]


def test_a_sample_is_stored_without_its_prompt():
    large = Prompt(id="p", text="x" * 10_000)
    row = attrs.evolve(sample(0), prompt=large)
    data = encode_sample(GroupId(0, "p"), row)
    assert len(data) < 400
    assert decode_sample(data, large) == row


async def test_samples_move_out_of_a_segment_that_is_mostly_dead(tmp_path):
    """Three fit into a segment, and of each three one stays; a reader looks them up again."""
    stay = (1, 4, 7)
    async with open_ledger(tmp_path, sizes=StoreLimits(segment=1_500_000)) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(*range(9))])
        for number in range(9):
            await ledger.record([finished(number, size=BIG)])
        before = sorted(tmp_path.glob("*.seg"))
        with read_ledger(tmp_path) as reader:
            assert [reader.samples(gid(number)).kept for number in stay] == [(sample(n, size=BIG),) for n in stay]
            await ledger.record([dropped(number, 0) for number in range(9) if number not in stay])
            await ledger.record([])  # a record returns before its dead bytes are reclaimed
            await ledger.record([])
            assert [reader.samples(gid(number)).kept for number in stay] == [(sample(n, size=BIG),) for n in stay]
        found = await ledger.begin(IDENTITY)
    assert [one.kept for one in found.unfinished if one.kept] == [(sample(n, size=BIG),) for n in stay]
    assert not set(before[:2]) & set(tmp_path.glob("*.seg"))


async def test_a_reader_looks_up_a_sample_again_that_has_moved_meanwhile(tmp_path, monkeypatch):
    await record(tmp_path, [pulled(0), finished(0), finished(0, 1, size=BIG)])
    answers = [[(True, InSegment(5, 0, 10, 0))]]

    def outdated(db: apsw.Connection, seq: int) -> list[tuple[bool, Location]]:
        return answers.pop() if answers else find_samples(db, seq)

    monkeypatch.setattr(_reader, "find_samples", outdated)
    assert stored(tmp_path).kept == (sample(0), sample(0, 1, size=BIG))
    assert not answers


async def test_a_damaged_sample_is_named(tmp_path):
    await record(tmp_path, [pulled(0), finished(0, size=BIG)])
    segment = tmp_path / "0000000000.seg"
    segment.write_bytes(bytes(segment.stat().st_size))
    with pytest.raises(LedgerError, match="the body of a sample of group 0/0 is damaged or gone"):
        stored(tmp_path)
    with pytest.raises(LedgerError, match="fails its checksum"):
        await unfinished(tmp_path)


async def test_a_summary_counts_the_kept_samples(tmp_path):
    await record(tmp_path, [pulled(0, 1, 2), finished(0), finished(0, 1), finished(1), quarantined(1, sample(1, 1))])
    with read_ledger(tmp_path) as reader:
        assert [(one.state, one.kept, one.unscored) for one in reader.summaries()] == [
            (State.WAITING, 2, 0),
            (State.QUARANTINED, 1, 1),
            (State.WAITING, 0, 0),
        ]
        assert reader.group_by_id(gid(0)) == prompt(0)
        assert list(reader.groups()) == []
