"""Answers that cannot be: they are errors that name the field and the value, and nothing of them is delivered."""

import json

import pytest
import trio

from trio_rollout import SamplingParams
from trio_rollout.errors import RequestRejected, SamplingRejected, ServerError, ServerLost, SettingsError
from trio_rollout.testing import Fault, Reply, Run

from .helpers import EXPECTED, FIVE, PROMPT, memory_world

pytestmark = pytest.mark.usefixtures("decoder")
STREAMED = pytest.mark.parametrize("streamed", ["whole", "events", "parts", "tokens", "announced"])
TINY_LOG_PROB = 2.0**-20


def answer(rid, ids, log_probs, *, finish="length", **more):
    meta = {
        "id": rid,
        "finish_reason": {"type": finish} if finish else None,
        "completion_tokens": len(ids),
        "weight_version": "default",
        "output_token_logprobs": [[value, token, None] for value, token in zip(log_probs, ids, strict=True)],
    }
    return {"text": "x" * len(ids), "output_ids": list(ids), "meta_info": meta} | more


def reply(seen, ids, log_probs, *, streamed, **more):
    """An answer with these tokens: whole, in events that repeat it, or in events with one token each."""
    if streamed == "whole":
        return Reply(body=answer(seen.rid, ids, log_probs, **more))
    events = []
    for stop in range(1, len(ids) + 1):
        start = stop - 1 if streamed == "parts" else 0
        finish = "length" if stop == len(ids) else None
        part = answer(seen.rid, ids[start:stop], log_probs[start:stop], finish=finish, **more)
        part["meta_info"]["completion_tokens"] = stop
        events.append(b"data: %b\n\n" % json.dumps(part).encode())
    body = b"".join([*events, b"data: [DONE]\n\n"])
    return Reply(body=body, headers={"content-type": "text/event-stream"}, chunked=streamed != "announced")


async def generate(run, streamed, model_input=PROMPT, sampling=FIVE, told=None):
    more = {}
    if streamed != "whole":
        more["on_progress"] = lambda: None
    if streamed == "tokens":
        more["on_tokens"] = (told if told is not None else []).append
    return await run.servers.generate(model_input, sampling, **more)


IMPOSSIBLE = {
    "an id beyond the vocabulary": ([6, 1000], [-1.0, -1.0], r"output_ids.*1000.*vocabulary's size 1000"),
    "the largest id": ([2147483647], [-1.0], r"output_ids.*2147483647.*1000"),
    "too many tokens": ([6] * 6, [-1.0] * 6, r"6 (tokens|events).*|more than 5|allowed: max_new_tokens 5"),
    "a log-prob above zero": ([6, 7], [-1.0, 0.5], r"output_token_logprobs\[1\] is 0.5"),
    "a log-prob a little above zero": ([6, 7], [0.01, -1.0], r"output_token_logprobs\[0\] is 0.0[01]"),
    "an infinite log-prob": ([6, 7], [-1.0, float("1e300")], "output_token_logprobs|not with an answer"),
    "a negative id": ([6, -1], [-1.0, -1.0], "not with an answer|-1"),
    "an id beyond int32": ([6, 2**31], [-1.0, -1.0], "not with an answer|2147483648"),
}


@STREAMED
@pytest.mark.parametrize("case", IMPOSSIBLE)
async def test_f113_output_that_cannot_be_is_a_server_error(autojump_clock, decoder, case, streamed):
    """The error names the field and the value; no token beyond the vocabulary reaches a callback; the next request works."""
    ids, log_probs, words = IMPOSSIBLE[case]
    told = []
    async with memory_world() as run:
        run.fake.plan = lambda seen: (
            reply(seen, ids, log_probs, streamed=streamed) if seen.path == "/generate" else None
        )
        with pytest.raises(ServerError, match=words) as caught:
            await generate(run, streamed, told=told)
        assert run.fake.url in str(caught.value)
        assert all(0 <= token < 1000 for seen in told for token in seen)
        assert all(len(seen) <= 5 for seen in told)
        run.fake.plan = ()
        assert (await generate(run, streamed)).output_ids.tolist() == EXPECTED


async def test_f113_a_million_tokens_for_three_are_refused(autojump_clock, decoder):
    """By their number, or already by their length: an answer to such a request needs no 10 MB."""
    async with memory_world() as run:
        run.fake.plan = lambda seen: (
            reply(seen, [6] * 10**6, [-1.0] * 10**6, streamed="whole") if seen.path == "/generate" else None
        )
        with pytest.raises(ServerError, match=r"allowed: \d+|max_new_tokens"):
            await run.servers.generate(PROMPT, SamplingParams(max_new_tokens=3))


async def test_f113_the_parameters_that_were_sent_bound_the_output(autojump_clock, decoder):
    """``max_new_tokens`` among the extras replaces the field, for the check too."""
    async with memory_world() as run:
        sampling = SamplingParams(max_new_tokens=100, extra={"max_new_tokens": 2})
        assert len((await run.servers.generate(PROMPT, sampling)).output_ids) == 2
        run.fake.plan = lambda seen: (
            reply(seen, [6, 7, 8], [-1.0] * 3, streamed="whole") if seen.path == "/generate" else None
        )
        with pytest.raises(ServerError, match="3 tokens, allowed: max_new_tokens 2"):
            await run.servers.generate(PROMPT, sampling)


@STREAMED
async def test_f113_rounding_is_no_damage(autojump_clock, decoder, streamed):
    """A log-softmax may end a little above zero, and a log-prob may be zero."""
    async with memory_world() as run:
        values = [0.0, -0.0, TINY_LOG_PROB, -87.0, 1e-7]
        run.fake.plan = lambda seen: (
            reply(seen, EXPECTED, values, streamed=streamed) if seen.path == "/generate" else None
        )
        turn = await generate(run, streamed)
        assert turn.log_probs.tolist() == pytest.approx(values)


async def test_f113_prompt_ids_of_a_text_are_checked_too(autojump_clock, decoder):
    async with memory_world() as run:
        run.fake.plan = lambda seen: (
            reply(seen, [6], [-1.0], streamed="whole", prompt_token_ids=[5, 1000]) if seen.path == "/generate" else None
        )
        with pytest.raises(ServerError, match=r"prompt_token_ids\[1\] is 1000"):
            await run.servers.generate("hello", FIVE)


# --- versions of another shape


@pytest.mark.parametrize("version", [{"a": 1}, [1, 2], [], {}, True, None, 1.5, -3, 10**18, "1" * 40], ids=repr)
@pytest.mark.parametrize("at", ["start", "answer", "spans", "look"])
async def test_f115_a_version_that_is_no_number_or_text_is_none(autojump_clock, decoder, version, at):
    """The client opens, generates and reads versions as if the server named none; so it does for a number that is no version."""
    info = Reply(body={"model_path": "fake", "is_generation": True, "weight_version": version})
    plan = {"/model_info": [info]} if at == "start" else {}
    async with memory_world(plan) as run:
        if at == "look":
            run.fake.plan = {"/model_info": [None, info, info]}
        if at in {"answer", "spans"}:
            spans = [{"version": version, "start": 0, "end": 5}] if at == "spans" else None

            def odd(seen):
                if seen.path != "/generate":
                    return None
                said = answer(seen.rid, EXPECTED, [-1.0] * 5)
                said["meta_info"] |= {"weight_version": version} | ({"weight_versions": spans} if spans else {})
                return Reply(body=said)

            run.fake.plan = odd
        run.servers.require_version(0)
        turn = await run.servers.generate(PROMPT, FIVE)
        assert turn.output_ids.tolist() == EXPECTED
        assert turn.weight_version == 0
        assert await run.servers.versions() in ({run.fake.url: None}, {run.fake.url: 0})
        run.servers.require_version(3)
        await run.servers.generate(PROMPT, FIVE)


@pytest.mark.parametrize("path", ["/model_info", "/server_info", "/v1/loads", "/ready", "/flush_cache"])
@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"7", b'"x"', b"{}", b'{"loads":7}', b'{"loads":[[]]}', b'{"loads":{"a":1}}', b"\xff"],
    ids=repr,
)
async def test_f115_control_answers_of_any_shape_are_answers_or_server_errors(autojump_clock, path, body):
    """None of them comes out as another exception."""
    async with memory_world() as run:
        run.fake.plan = lambda seen: Reply(body=body) if seen.path == path else None
        view = run.servers
        for ask in (view.versions, view.health, view.flush_cache, view.abort_until_idle):
            try:
                with trio.move_on_after(40):
                    await ask()
            except ServerError:
                pass


# --- broken streams


BREAKS = {
    "a garbage chunk size": b"zz\r\n",
    "bytes behind the end": b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
    "no JSON": b"9\r\ndata: {}\n\r\n",
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("aborts", ["heard", "in vain"])
async def test_f116_a_broken_stream_is_aborted_and_counted(autojump_clock, broken, aborts):
    """The request is aborted like every other; if that does not help it is counted as an orphan."""
    async with memory_world() as run:
        hear = aborts == "heard"
        run.fake.incremental = True  # events that repeat the answer are decoded at its end
        run.fake.plan = lambda seen: (
            Run(partial=2)
            if seen.path == "/generate"
            else Fault.IGNORE
            if seen.path == "/abort_request" and not hear
            else None
        )
        run.fake.disconnect_s = 1e9
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def break_it():
                await run.fake.until(lambda: run.fake.in_flight == 1)
                await trio.sleep(0.1)
                for wire in run.host().wires:
                    wire.down.put(BREAKS[broken])

            with pytest.raises(ServerError) as caught:
                await generate(run, "events")
        assert run.fake.url in str(caught.value)
        assert set(run.fake.aborts) == set(run.fake.generates)
        assert run.fake.in_flight == (0 if hear else 1)
        assert run.servers.statistics().orphans == (0 if hear else 1)
        assert trio.current_time() <= 5.2


class Mine(Exception):
    """The user's."""


@pytest.mark.parametrize("error", [ValueError("mine"), OSError("mine"), Mine("mine"), SystemExit("mine")], ids=repr)
@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("callback", ["on_tokens", "on_progress"])
async def test_f116_the_users_exception_is_the_users_and_the_request_is_aborted(
    autojump_clock, error, incremental, callback
):
    """It comes out as it is; its request ends on the server, and the connection serves the next one."""

    def fail(*_):
        raise error

    async with memory_world([Run(partial=2)]) as run:
        run.fake.incremental = incremental
        with pytest.raises(type(error), match="mine") as caught:
            await run.servers.generate(PROMPT, FIVE, **{callback: fail})
        assert caught.value is error
        assert run.fake.aborts == run.fake.generates
        assert run.fake.in_flight == 0
        assert run.servers.statistics().orphans == run.servers.statistics().owed_aborts == 0
        before = run.fake.accepted
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        assert run.fake.accepted == before


async def test_f116_a_stream_that_is_cut_off_is_aborted_until_it_has_ended(autojump_clock):
    """One abort that gets lost is repeated, as for a cancelled request."""
    lost = [Fault.IGNORE, Fault.IGNORE]
    async with memory_world() as run:
        run.fake.plan = lambda seen: (
            Run(partial=2)
            if seen.path == "/generate"
            else lost.pop()
            if seen.path == "/abort_request" and lost
            else None
        )
        run.fake.disconnect_s = 1e9
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def break_it():
                await run.fake.until(lambda: run.fake.in_flight == 1)
                await trio.sleep(0.1)
                run.host().reset_connections()

            with pytest.raises(ServerLost) as caught:
                await generate(run, "events")
        assert caught.value.tokens.output_ids.tolist() == EXPECTED[:2]
        assert len(run.fake.aborts) == 3
        assert (run.fake.in_flight, run.servers.statistics().orphans) == (0, 0)


# --- a text prompt whose ids do not come back


@pytest.mark.parametrize(
    "more", [{}, {"prompt_token_ids": None}, {"prompt_token_ids": []}], ids=["absent", "null", "empty"]
)
@pytest.mark.parametrize("streamed", ["whole", "events"])
async def test_f119_an_aborted_answer_to_a_text_without_prompt_ids_is_an_error_if_it_has_tokens(
    autojump_clock, decoder, streamed, more
):
    """A turn that went on from it would go on from the output alone. An empty one goes on from the text."""
    async with memory_world() as run:

        def aborted(seen):
            if seen.path != "/generate":
                return None
            said = answer(seen.rid, [6, 7, 8], [-1.0] * 3, finish="abort", **more)
            body = json.dumps(said).encode()
            if streamed == "whole":
                return Reply(body=body)
            events = b"data: %b\n\ndata: [DONE]\n\n" % body
            return Reply(body=events, headers={"content-type": "text/event-stream"})

        run.fake.plan = aborted
        with pytest.raises(ServerError, match="prompt_token_ids is missing"):
            await generate(run, streamed, "hello")


async def test_f119_a_stream_to_a_text_that_is_cut_off_has_no_tokens_without_the_prompts_ids(autojump_clock, decoder):
    """They could not be gone on from, and would be a row without a prompt."""
    async with memory_world() as run:

        def half(seen):
            if seen.path != "/generate":
                return None
            event = b"data: %b\n\n" % json.dumps(answer(seen.rid, [6, 7], [-1.0] * 2, finish=None)).encode()
            return Reply(body=event, headers={"content-type": "text/event-stream"}, chunked=True)

        run.fake.plan = half
        with pytest.raises(ServerLost) as caught:
            await generate(run, "events", "hello")
        assert caught.value.tokens is None


# --- parameters that only the vocabulary shows to be wrong


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (SamplingParams(stop_token_ids=[5, 1000]), r"stop_token_ids\[1\]: got 1000, allowed: .*1000"),
        (SamplingParams(extra={"stop_token_ids": [2**31 - 1]}), r"stop_token_ids\[0\]: got 2147483647"),
        (SamplingParams(extra={"logit_bias": {"7": 1.0, "1000": 2.0}}), r"logit_bias.*1000"),
    ],
)
@pytest.mark.parametrize("model_input", [PROMPT, "hello"], ids=["ids", "text"])
async def test_f114_ids_in_the_parameters_are_checked_once_the_vocabulary_is_known(
    autojump_clock, sampling, words, model_input
):
    async with memory_world() as run:
        with pytest.raises(SamplingRejected, match=words) as caught:
            await run.servers.generate(model_input, sampling)
        assert isinstance(caught.value, SettingsError)
        assert isinstance(caught.value, RequestRejected)
        assert run.fake.generates == []


@pytest.mark.parametrize("extra", [{"x": float("inf")}, {"x": {"y": [float("nan")]}}], ids=repr)
async def test_f114_what_would_be_sent_as_null_is_refused_among_a_requests_extras(autojump_clock, extra):
    async with memory_world() as run:
        with pytest.raises(RequestRejected, match=r"extra\['x'\].*finite"):
            await run.servers.generate(PROMPT, FIVE, extra=extra)
