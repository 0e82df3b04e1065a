"""Streamed answers: the same Turn as without streaming, progress while they come, and what a broken one leaves."""

import contextlib
import itertools
import json

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout import PauseMode, SamplingParams, Stop
from trio_rollout._http import BadResponse
from trio_rollout.errors import RequestRejected, ServerBusy, ServerError, ServerLost
from trio_rollout.sglang import _wire as wire
from trio_rollout.testing import Fault, Reply, Run

from .helpers import EXPECTED, FIVE, PROMPT, Asked, memory_world, socket_world

pytestmark = pytest.mark.usefixtures("decoder")

RID = "0123456789abcdef" * 2
BOTH = pytest.mark.parametrize("incremental", [False, True], ids=["whole", "parts"])


def nothing() -> None:
    pass


@BOTH
@pytest.mark.parametrize("world", [memory_world, socket_world])
async def test_a_streamed_answer_is_the_same_turn(world, incremental):
    async with world() as run:
        run.fake.incremental = incremental
        calls = []
        plain = await run.servers.generate(PROMPT, FIVE)
        turn = await run.servers.generate(PROMPT, FIVE, on_progress=lambda: calls.append(trio.current_time()))
        assert turn.output_ids.tolist() == plain.output_ids.tolist() == EXPECTED
        assert turn.log_probs.tolist() == plain.log_probs.tolist()
        assert (turn.text, turn.stop, turn.versions) == (plain.text, plain.stop, plain.versions)
        assert len(calls) == 5
        assert run.fake.accepted == 2  # the connection is used again


@BOTH
async def test_progress_is_told_while_the_answer_comes(autojump_clock, incremental):
    done = trio.Event()
    async with memory_world([Run(until=done, partial=3)]) as run, trio.open_nursery() as nursery:
        run.fake.incremental = incremental
        times = []

        async def one() -> None:
            await run.servers.generate(PROMPT, FIVE, on_progress=lambda: times.append(trio.current_time()))

        nursery.start_soon(one)
        await trio.sleep(10)
        assert times == [0.0] * 3
        done.set()
        await trio.sleep(1)
        assert times == [0.0] * 3 + [10.0] * 2


@BOTH
async def test_the_tokens_so_far_are_told(autojump_clock, incremental):
    async with memory_world() as run:
        run.fake.incremental = incremental
        told = []
        await run.servers.generate(PROMPT, FIVE, on_tokens=lambda ids: told.append(list(ids)))
        assert told == [EXPECTED[: place + 1] for place in range(5)]


@BOTH
@pytest.mark.parametrize("fault", [Fault.RESET_IN_BODY, Fault.SHORT_BODY, Fault.SHORT_CHUNKED, Fault.NO_DONE])
async def test_a_stream_that_breaks_off_leaves_its_tokens(autojump_clock, fault, incremental):
    """ServerLost with a turn of what had come: stop ABORT, versions and log-probs of the same length."""
    async with memory_world([fault]) as run:
        run.fake.incremental = incremental
        run.fake.version = "4"
        with pytest.raises(ServerLost) as caught:
            await run.servers.generate(PROMPT, SamplingParams(max_new_tokens=10), on_progress=nothing)
        tokens = caught.value.tokens
        count = 10 if fault is Fault.NO_DONE else 5
        if fault is Fault.RESET_IN_BODY and tokens is None:
            return  # a reset loses what was under way
        assert tokens.stop is Stop.ABORT
        assert 0 < len(tokens.output_ids) <= count
        assert tokens.output_ids.tolist() == [6 + place for place in range(len(tokens.output_ids))]
        assert len(tokens.log_probs) == len(tokens.output_ids)
        assert tokens.versions == ((0, len(tokens.output_ids), 4),)
        assert (await run.servers.generate(PROMPT, FIVE, on_progress=nothing)).output_ids.tolist() == EXPECTED


async def test_a_server_that_dies_in_a_stream_leaves_the_tokens_it_had_sent(autojump_clock):
    async with memory_world([Run(partial=3)]) as run:
        failures = []

        async def lose() -> None:
            with pytest.raises(ServerLost) as caught:
                await run.servers.generate(PROMPT, FIVE, on_progress=nothing)
            failures.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            await trio.sleep(1)
            run.fake.kill()
        assert failures[0].tokens.output_ids.tolist() == EXPECTED[:3]


async def test_a_stream_without_a_token_leaves_none(autojump_clock):
    async with memory_world([Fault.CLOSE]) as run:
        with pytest.raises(ServerLost) as caught:
            await run.servers.generate(PROMPT, FIVE, on_progress=nothing)
        assert caught.value.tokens is None


@BOTH
async def test_an_aborted_stream_returns_what_it_has(autojump_clock, incremental):
    async with memory_world([Run(partial=3)]) as run:
        run.fake.incremental = incremental
        turns = []

        async def one() -> None:
            turns.append(await run.servers.generate(PROMPT, FIVE, on_progress=nothing))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(1)
            await run.servers.pause(PauseMode.ABORT)
        assert turns[0].stop is Stop.ABORT
        assert turns[0].output_ids.tolist() == EXPECTED[:3]


async def test_a_cancelled_stream_is_aborted_and_tells_no_more(autojump_clock):
    async with memory_world([Run(partial=2)]) as run:
        calls, told = [], []
        with trio.move_on_after(1):
            await run.servers.generate(
                PROMPT,
                FIVE,
                on_progress=lambda: calls.append(trio.current_time()),
                on_tokens=lambda ids: told.append(len(ids)),
            )
        assert told == [1, 2]
        assert run.fake.aborts == run.fake.generates
        assert calls == [0.0, 0.0]
        assert run.fake.in_flight == 0


@pytest.mark.parametrize(
    ("code", "kind"), [(400, RequestRejected), (503, ServerBusy), (500, ServerError), (None, ServerError)]
)
async def test_a_refusal_inside_a_stream_counts_as_the_status_it_names(autojump_clock, code, kind):
    """HTTP 200, and the error in an event: the same exceptions as without streaming."""
    event = {"error": {"message": "no way", "type": "invalid_request_error", "code": code, "retryable": False}}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    reply = Reply(body=body, headers={"content-type": "text/event-stream"})
    async with memory_world([reply]) as run:
        call = run.servers.generate(PROMPT, FIVE, on_progress=nothing)
        if kind is ServerBusy:
            assert (await call).output_ids.tolist() == EXPECTED  # asked again
        else:
            with pytest.raises(kind, match="no way") as caught:
                await call
            assert type(caught.value) is kind


async def test_a_server_that_does_not_stream_is_understood_too(autojump_clock):
    """Plain JSON in answer to a streamed request."""
    answer = {"text": "x", "output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}}}
    answer["meta_info"]["output_token_logprobs"] = [[-1, 5]]
    async with memory_world([Reply(body=answer)]) as run:
        assert (await run.servers.generate(PROMPT, FIVE, on_progress=nothing)).output_ids.tolist() == [5]


@pytest.mark.parametrize("fault", [Fault.MALFORMED_JSON, Fault.WRONG_TYPE, Fault.OTHER_TOKEN, Fault.NO_LOG_PROBS])
@BOTH
async def test_a_damaged_stream_is_a_server_error(autojump_clock, fault, incremental):
    async with memory_world([fault]) as run:
        run.fake.incremental = incremental
        with pytest.raises(ServerError) as caught:
            await run.servers.generate(PROMPT, FIVE, on_progress=nothing)
        assert type(caught.value) is ServerError
        assert run.fake.url in str(caught.value)


# --- the decoder by itself


def asked(version_of=lambda name: int(name or 0)):
    request = wire.RequestEncoder(None).encode(PROMPT, SamplingParams(max_new_tokens=300), {})
    return Asked(attempted="POST x", rid=RID, request=request, version_of=version_of)


def events(count, *, incremental, claim=True, repeat_last=False):
    """The stream of an answer of ``count`` tokens, one a step."""
    out = [b": a comment\n", b"event: odd\n"]
    for stop in range(1, count + 1):
        start = stop - 1 if incremental else 0
        meta = {"id": RID, "finish_reason": None, "weight_version": "3"}
        meta["output_token_logprobs"] = [[-float(place), place + 10, None] for place in range(start, stop)]
        if claim:
            meta["completion_tokens"] = stop
        if stop == count:
            meta |= {"finish_reason": {"type": "abort" if repeat_last else "stop"}}
            meta["weight_versions"] = [{"version": "3", "start": 0, "end": count}]
        ids = list(range(start + 10, stop + 10))
        out.append(
            b"data: %b\n\n" % json.dumps({"text": "x" * len(ids), "output_ids": ids, "meta_info": meta}).encode()
        )
    if repeat_last:
        out.append(out[-1])
    return b"".join([*out, b"data: [DONE]\n\n"])


def decoded(data, cuts=()):
    decoder = wire.StreamDecoder(asked().request, nothing)
    marks = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    for start, stop in itertools.pairwise(marks):
        decoder.feed(data[start:stop])
    return decoder


@given(st.integers(1, 9), st.booleans(), st.booleans(), st.lists(st.integers(0, 5000), max_size=12), st.booleans())
def test_any_cut_of_any_stream_gives_the_same_turn(count, incremental, claim, cuts, crlf):
    data = events(count, incremental=incremental, claim=claim)
    turn = decoded(data.replace(b"\n", b"\r\n") if crlf else data, cuts).turn(asked())

    assert turn.output_ids.tolist() == list(range(10, 10 + count))
    assert turn.log_probs.tolist() == [-float(place) for place in range(count)]
    assert turn.versions == ((0, count, 3),)
    assert turn.text == "x" * count


@given(st.integers(1, 6), st.booleans(), st.integers(0, 5000))
def test_a_stream_cut_anywhere_is_never_a_turn_and_keeps_only_whole_tokens(count, incremental, at):
    data = events(count, incremental=incremental)
    decoder = decoded(data[: at % (len(data) - len(b"data: [DONE]\n\n"))])

    assert decoder.turn(asked()) is None
    rest = decoder.cut_off(asked())
    if rest is not None:
        assert rest.output_ids.tolist() == list(range(10, 10 + len(rest.output_ids)))
        assert len(rest.log_probs) == len(rest.output_ids)
        assert rest.stop is Stop.ABORT


def test_a_token_that_is_sent_twice_with_an_abort_is_trimmed():
    turn = decoded(events(4, incremental=True, repeat_last=True)).turn(asked())

    assert turn.output_ids.tolist() == [10, 11, 12, 13]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_noise_is_a_server_error_or_nothing(noise, cuts):
    with contextlib.suppress(ServerError, BadResponse):
        decoder = decoded(b"data: " + noise + b"\ndata: [DONE]\n\n", cuts)
        assert decoder.turn(asked()) is None
        assert decoder.cut_off(asked()) is None


@pytest.mark.parametrize("before", [0, 3], ids=["first", "after whole answers"])
def test_an_event_that_is_nested_without_end_is_a_server_error(before):
    deep = b'data: {"meta_info":{"finish_reason":' + b"[" * 5000 + b"]" * 5000 + b"}}\n\ndata: [DONE]\n\n"
    told = []
    decoder = wire.StreamDecoder(asked().request, on_tokens=told.append)
    data = events(before, incremental=False).replace(b"data: [DONE]\n\n", b"") + deep if before else deep

    with pytest.raises(BadResponse, match="recursion"):
        decoder.feed(data)
    assert decoder.cut_off(asked()) is None
    assert len(told) <= before


def test_answers_that_repeat_are_not_decoded_one_by_one():
    """A long stream whose events repeat the answer costs one decoding, not one for each token."""
    decoder = decoded(events(300, incremental=False))

    assert decoder._repeats
    assert len(decoder.turn(asked()).output_ids) == 300
