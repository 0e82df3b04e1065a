"""Recorded turns: kept while their sample is not finished, ignored when they come too late, gone with sample or group."""

from pathlib import Path

import apsw
import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_rollout._core.enums import Cause, Stop
from trio_rollout._core.ledger_events import Filtered, LedgerEvent
from trio_rollout._core.turn_log import RecordedTurn
from trio_rollout._core.values import GroupId, Turn, VersionSpan
from trio_rollout.errors import DataRefused, LedgerError
from trio_rollout.ledger import open_ledger
from trio_rollout.ledger._codec import decode_turn, encode_turn
from trio_rollout.ledger._store import StoreLimits

from ._samples import (
    BIG,
    IDENTITY,
    acked,
    delivered,
    dropped,
    finished,
    gid,
    pulled,
    quarantined,
    ready,
    recorded,
    requeued,
    sample,
    turn,
    turns_dropped,
)
from .test_codec import any_text, ids, metadata
from .test_samples import record, unfinished


async def turns(path: Path) -> dict[int, tuple[RecordedTurn, ...]]:
    """The turns of the only unfinished group, by the sample's index."""
    (one,) = await unfinished(path)
    return dict(one.turns)


def stored_rows(path: Path) -> int:
    """Return the number of turns in the database, whichever group they are of."""
    db = apsw.Connection(str(path / "ledger.db"))
    try:
        ((count,),) = db.execute("SELECT count(*) FROM turns")
        return count
    finally:
        db.close()


async def test_a_restart_finds_the_turns_of_each_sample_in_their_order(tmp_path):
    """One record holds turns of many groups; a large one lies in a segment."""
    events = [recorded(0, 1, 1), recorded(2), recorded(0, 1, 0, size=BIG), recorded(0, 0, 7)]
    await record(tmp_path, [pulled(0, 1, 2)], events)
    assert [one.turns for one in await unfinished(tmp_path)] == [
        {0: (turn(7),), 1: (turn(0, size=BIG), turn(1))},
        {},
        {0: (turn(0),)},
    ]
    assert [entry.name for entry in tmp_path.glob("*.seg")] == ["0000000000.seg"]


async def test_a_finished_sample_replaces_its_turns(tmp_path):
    await record(tmp_path, [pulled(0)], [recorded(0, 0), recorded(0, 0, 1, size=BIG), recorded(0, 1)], [finished(0)])
    (one,) = await unfinished(tmp_path)
    assert (one.kept, one.turns) == ((sample(0),), {1: (turn(),)})
    assert stored_rows(tmp_path) == 1


async def test_dropped_turns_are_gone(tmp_path):
    """Those that are not there, and those of a settled or unknown group, are ignored."""
    await record(tmp_path, [pulled(0)], [recorded(0, 0, number) for number in range(4)])
    await record(tmp_path, [turns_dropped(0, 0, 1, 3, 9), turns_dropped(0, 1, 0), turns_dropped(7, 0, 0)])
    assert await turns(tmp_path) == {0: (turn(0), turn(2))}


async def test_a_requeue_keeps_the_turns(tmp_path):
    await record(tmp_path, [pulled(0)], [recorded(0), requeued(0, 1, Cause.DEADLINE)])
    assert await turns(tmp_path) == {0: (turn(),)}


async def test_a_sample_that_is_dropped_begins_without_turns(tmp_path):
    await record(tmp_path, [pulled(0), recorded(0), finished(0)], [dropped(0, 0)])
    assert await turns(tmp_path) == {}
    await record(tmp_path, [recorded(0, 0, 0)])
    assert await turns(tmp_path) == {0: (turn(),)}


SETTLED: dict[str, list[list[LedgerEvent]]] = {
    "ready": [[ready(0)]],
    "delivered": [[ready(0)], [delivered(0, 0)]],
    "acked": [[ready(0)], [delivered(0, 0)], [acked(0, 0)]],
    "filtered": [[Filtered(id=gid(0), attempt=1, reason="too easy")]],
    "quarantined": [[quarantined(0, sample(0, 1))]],
    "stale": [[ready(0)], [requeued(0, 1, Cause.STALE, attempts=0)]],
}


@pytest.mark.parametrize("keep_acked", [True, False])
@pytest.mark.parametrize("state", SETTLED)
async def test_turns_go_in_the_transaction_that_settles_their_group(tmp_path, state, keep_acked):
    """If that is refused, they stay."""
    settle = SETTLED[state]
    await record(tmp_path, [pulled(0)], [recorded(0), recorded(0, 1, size=BIG)])
    with pytest.raises(LedgerError, match="never pulled"):
        await record(tmp_path, [*settle[0], ready(9)])
    assert await turns(tmp_path) == {0: (turn(),), 1: (turn(size=BIG),)}
    await record(tmp_path, *settle, keep_acked=keep_acked)
    assert stored_rows(tmp_path) == 0


@pytest.mark.parametrize("state", [*SETTLED, "never pulled"])
async def test_a_turn_that_comes_after_its_group_has_settled_is_ignored(tmp_path, state):
    """The other events of its record are written, its body takes no space for long, and the ledger goes on."""
    number = 9 if state == "never pulled" else 0
    await record(tmp_path, [pulled(0, 1)], *SETTLED.get(state, []))
    await record(tmp_path, [recorded(number, size=BIG), recorded(1)])
    found = {one.prompt.id: one.turns for one in await unfinished(tmp_path)}
    assert found.pop("1") == {0: (turn(),)}
    if state != "stale":  # that one waits again
        assert not any(found.values())
        assert stored_rows(tmp_path) == 1
        assert sum(entry.stat().st_size for entry in tmp_path.glob("*.seg")) == 0


async def test_turns_move_out_of_a_segment_that_is_mostly_dead(tmp_path):
    """Three fit into a segment, and of each three one stays."""
    stay = (1, 4, 7)
    async with open_ledger(tmp_path, sizes=StoreLimits(segment=3_000_000)) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(*range(9))])
        for number in range(9):
            await ledger.record([recorded(number, size=BIG)])
        before = sorted(tmp_path.glob("*.seg"))
        await ledger.record([turns_dropped(number, 0, 0) for number in range(9) if number not in stay])
        await ledger.record([])  # a record returns before its dead bytes are reclaimed
        await ledger.record([])
        found = await ledger.begin(IDENTITY)
    assert [dict(one.turns) for one in found.unfinished if one.turns] == [{0: (turn(size=BIG),)}] * 3
    assert not set(before[:2]) & set(tmp_path.glob("*.seg"))


async def test_a_damaged_turn_is_never_misread(tmp_path):
    """In a segment and in the database."""
    await record(tmp_path, [pulled(0), recorded(0, size=BIG)])
    segment = tmp_path / "0000000000.seg"
    segment.write_bytes(bytes(segment.stat().st_size))
    with pytest.raises(LedgerError, match="fails its checksum"):
        await unfinished(tmp_path)
    beside = tmp_path / "beside"
    await record(beside, [pulled(0), recorded(0)])
    db = apsw.Connection(str(beside / "ledger.db"))
    ((body,),) = db.execute("SELECT body FROM turns")
    db.execute("UPDATE turns SET body = ?", (body.replace(b"turn 0", b"turn 1"),))
    db.close()
    with pytest.raises(LedgerError, match="a recorded turn is damaged: it fails its checksum"):
        await unfinished(beside)


async def test_a_turn_that_cannot_be_stored_names_its_group(tmp_path):
    """The engine leaves it out and records the others again."""
    bad = attrs.evolve(turn(3), turn=attrs.evolve(turn(3).turn, meta_info={"raw": object()}))
    what = r"turn 3 of sample 2 of group 0/1 can't be written.*meta_info\['raw'\]"
    with pytest.raises(DataRefused, match=what) as caught:
        await record(tmp_path, [pulled(0, 1)], [recorded(0), attrs.evolve(recorded(1, 2), record=bad)])
    assert caught.value.group == gid(1)


# The codec.

OF = GroupId(0, "p")


@st.composite
def recorded_turns(draw: st.DrawFn) -> RecordedTurn:
    tokens = draw(ids)
    seconds = st.none() | st.floats(0, 1e6)
    answer = Turn(
        rid=draw(any_text),
        prompt_ids=draw(st.just([]) | ids),
        output_ids=tokens,
        log_probs=draw(st.lists(st.floats(-1e3, 0, width=32), min_size=len(tokens), max_size=len(tokens))),
        text=draw(any_text),
        stop=draw(st.sampled_from(Stop)),
        weight_version=draw(st.integers(0, 2**40)),
        versions=[VersionSpan(0, len(tokens), draw(st.integers(0, 2**40)))],
        cached_tokens=draw(st.integers(0, 2**31)),
        queue_s=draw(seconds),
        latency_s=draw(seconds),
        meta_info=draw(metadata),
    )
    number, beside = draw(st.integers(0, 2**31)), draw(st.integers(0, 99))
    return RecordedTurn(number=number, request=draw(st.binary(min_size=16, max_size=16)), turn=answer, beside=beside)


@settings(max_examples=60, deadline=None)
@given(recorded_turns())
def test_turns_come_back_equal(value: RecordedTurn):
    assert decode_turn(encode_turn(OF, 0, value)) == value


def test_extra_arrays_come_back_read_only_and_of_their_type():
    extras = {"experts": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2], "half": np.array([0.5], np.float16)}
    value = attrs.evolve(turn(), turn=attrs.evolve(turn().turn, extras=extras))
    again = decode_turn(encode_turn(OF, 0, value)).turn
    assert again.extras.keys() == extras.keys()
    for name, array in extras.items():
        assert again.extras[name].dtype == array.dtype
        assert np.array_equal(again.extras[name], array)
        assert not again.extras[name].flags.writeable
    assert not again.output_ids.flags.writeable


@given(st.data(), recorded_turns())
@settings(max_examples=60, deadline=None)
def test_changed_bytes_are_refused(data: st.DataObject, value: RecordedTurn):
    """Any byte changed, any end cut off, anything appended."""
    encoded = bytearray(encode_turn(OF, 0, value))
    place = data.draw(st.integers(0, len(encoded) - 1))
    match data.draw(st.sampled_from(["change", "cut", "append"])):
        case "change":
            encoded[place] ^= data.draw(st.integers(1, 255))
        case "cut":
            del encoded[place:]
        case "append":
            encoded += data.draw(st.binary(min_size=1, max_size=8))
    with pytest.raises(LedgerError, match="damaged"):
        decode_turn(bytes(encoded))


def test_the_prompt_of_a_request_is_not_stored():
    """A record is as long as its answer, however long the conversation before it was."""
    assert len(encode_turn(OF, 0, turn())) < 400
