"""The pure parts of exec sessions: ids, eviction, buffers, limits of waits, texts."""

import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout.tools import ExecLimits
from trio_rollout.tools._commands.output import HeadTailBuffer
from trio_rollout.tools._exec.sessions import SessionStore, evicted, exec_yield, poll_yield
from trio_rollout.tools._exec.values import ExecOutput, middle_truncated


@attrs.define(eq=False)
class Stored:
    process_id: int
    last_used: float
    ended: bool = False
    busy: bool = False


def stored(count, **changes):
    """Return ``count`` sessions, the oldest first; ``changes`` maps e1 to the changed fields of session 1."""
    entries = [Stored(number, float(number)) for number in range(count)]
    for name, change in changes.items():
        for field, value in change.items():
            setattr(entries[int(name[1:])], field, value)
    return entries


SMALL = ExecLimits(max_processes=4, protected=2)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (stored(3), None),  # there is room
        (stored(4), 0),  # the least recently used living one
        (stored(4, e1={"ended": True}), 1),  # an ended one goes first
        (stored(4, e3={"ended": True}), 0),  # unless it was used recently
        (stored(4, e0={"busy": True}), 1),  # one in use is passed over
        (stored(4, e0={"busy": True}, e1={"busy": True}), None),  # the store may hold more than it should
        (stored(4, e1={"ended": True, "busy": True}), None),  # it is about to go: no living one is sacrificed
    ],
)
def test_the_session_that_is_evicted(entries, expected):
    chosen = evicted(entries, SMALL)

    assert (None if chosen is None else chosen.process_id) == expected


def test_random_ids_are_in_range_and_differ():
    store = SessionStore(random.Random(0).randrange)
    ids = {store.reserve() for _ in range(1000)}

    assert len(ids) == 1000
    assert all(1000 <= number < 100_000 for number in ids)


def test_an_id_that_names_another_session_now_is_not_freed_by_the_old_one():
    store = SessionStore(lambda first, _end: first)
    old, new = Stored(store.reserve(), 0.0), Stored(1000, 1.0)
    store.insert(old)
    store.release(old)
    assert store.reserve() == 1000
    store.insert(new)
    store.release(old)

    assert store.get(1000) is new
    assert (store.holds(old), store.holds(new)) == (False, True)


@pytest.mark.parametrize(("asked", "start", "poll"), [
    (0.0, 0.25, 5.0),
    (0.25, 0.25, 5.0),
    (10.0, 10.0, 10.0),
    (60.0, 30.0, 60.0),
    (1e9, 30.0, 300.0),
])  # fmt: skip
def test_how_long_calls_wait(asked, start, poll):
    limits = ExecLimits()

    assert (exec_yield(limits, asked), poll_yield(limits, asked)) == (start, poll)


def fill(limit, *chunks):
    buffer = HeadTailBuffer(limit)
    for chunk in chunks:
        buffer.append(chunk)
    return buffer


@pytest.mark.parametrize(("limit", "chunks", "rendered"), [
    (10, [b"0123456789"], b"0123456789"),
    (10, [b"0123456789", b"ab"], b"01234\n... 2 bytes omitted ...\n789ab"),
    (10, [b"01234", b"5678901234abcde"], b"01234\n... 10 bytes omitted ...\nabcde"),
    (5, [b"abcdefgh"], b"ab\n... 3 bytes omitted ...\nfgh"),
    (1, [b"abc"], b"\n... 2 bytes omitted ...\nc"),
    (0, [b"abc"], b"\n... 3 bytes omitted ...\n"),
    (10, [], b""),
])  # fmt: skip
def test_head_and_tail_are_kept(limit, chunks, rendered):
    assert fill(limit, *chunks).rendered() == rendered


@given(st.integers(0, 40), st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=12))
def test_however_it_is_chunked_and_drained_the_result_is_that_of_one_stream(limit, steps):
    """Codex: ``output_collection_stays_bounded_across_repeated_drains``, ``…preserves_omissions…``."""
    pending, gathered = HeadTailBuffer(limit), HeadTailBuffer(limit)
    for chunk, drain in steps:
        pending.append(chunk)
        if drain:
            pending.drain_into(gathered)
    pending.drain_into(gathered)
    whole = fill(limit, b"".join(chunk for chunk, _ in steps))

    assert (gathered.rendered(), gathered.omitted, len(gathered)) == (whole.rendered(), whole.omitted, len(whole))
    assert (len(pending), pending.total) == (0, 0)


def test_the_response_text_has_its_lines_in_order():
    output = ExecOutput(
        call_id="c", chunk_id="00beef", wall_time=1.5, output=b"hi", exit_code=3, original_token_count=1
    )

    assert output.model_text() == (
        "Chunk ID: 00beef\nWall time: 1.5000 seconds\nProcess exited with code 3\nOriginal token count: 1\nOutput:\nhi"
    )
    alive = attrs.evolve(output, exit_code=None, process_id=1234)
    assert "Process running with session ID 1234" in alive.model_text()
    assert "exited" not in alive.model_text()


def test_long_output_loses_its_middle():
    text = middle_truncated(b"a" * 100 + b"b" * 100, 10)

    assert text == "a" * 20 + "\n… 40 tokens truncated …\n" + "b" * 20


def test_a_session_output_is_a_success_whatever_its_exit_code():
    output = ExecOutput(call_id="c", chunk_id="0", wall_time=0, output=b"", exit_code=1)

    assert output.success_for_logging is True
    assert output.success is None
