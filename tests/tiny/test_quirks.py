"""Behaviour of a real SGLang that a client would not expect; each was observed on one."""

import json

import pytest
import trio

from ._client import PROMPT, Client


async def steps(count: float) -> None:
    """Let this many decode steps happen."""
    await trio.sleep(count)


async def test_a_running_request_gets_one_more_token_when_it_is_aborted(client: Client):
    pending = client.start(rid="a", max_new_tokens=100, return_logprob=True)
    await steps(3.5)
    before = len(client.server.frontend.scheduler.running[0].output_ids)
    assert (await client.call("/abort_request", {"rid": "a"})).status == 200
    answer = await pending.result()
    meta = answer["meta_info"]

    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert len(answer["output_ids"]) == before + 1 == meta["completion_tokens"] == len(meta["output_token_logprobs"])


async def test_a_queued_request_that_is_aborted_has_no_tokens_and_less_meta_info(client: Client):
    running = [client.start(max_new_tokens=50) for _ in range(2)]
    await steps(2)
    queued = client.start(rid="q", return_logprob=True)
    await steps(1)
    await client.call("/abort_request", {"rid": "q"})
    meta = (await queued.result())["meta_info"]

    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & meta.keys()
    assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
    for one in running:
        assert len((await one.result())["output_ids"]) == 50


async def test_an_abort_matches_by_prefix_once_its_own_rid_is_active(client: Client):
    first, second = client.start(rid="ab", max_new_tokens=100), client.start(rid="abc", max_new_tokens=100)
    await steps(2)
    await client.call("/abort_request", {"rid": "a"})  # the rid of no request: no effect
    await steps(2)
    assert not first.done.is_set()
    await client.call("/abort_request", {"rid": "ab"})

    assert {(await one.result())["meta_info"]["finish_reason"]["type"] for one in (first, second)} == {"abort"}


async def test_a_request_that_comes_during_a_pause_is_parked_and_loses_its_aborts(client: Client):
    await client.call("/pause_generation", {"mode": "in_place"})
    parked = client.start(rid="p", max_new_tokens=5)
    await steps(10)
    await client.call("/abort_request", {"rid": "p"})
    await client.call("/continue_generation", {})
    await steps(2)
    await client.call("/abort_request", {"rid": "p"})  # swallowed: one was sent before
    answer = await parked.result()

    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


async def test_a_parked_stream_that_is_closed_never_runs(client: Client):
    await client.call("/pause_generation", {"mode": "in_place"})
    stream = await client.begin(rid="p", max_new_tokens=500, stream=True)
    await steps(2)
    await stream.aclose()
    await steps(1)
    assert client.server.statistics().active == 0
    await client.call("/continue_generation", {})
    await steps(3)
    assert client.server.statistics().running == 0


async def test_a_pause_in_mode_abort_ends_everything_and_takes_a_second(client: Client):
    running = [client.start(max_new_tokens=100) for _ in range(2)]
    await steps(1)
    queued = client.start(max_new_tokens=100)
    await steps(2.5)
    began = trio.current_time()
    paused = await client.call("/pause_generation", {})
    took = trio.current_time() - began

    assert paused.json == {"message": "Generation paused successfully.", "status": "ok"}
    assert 1.0 <= took <= 2.0
    for one in (*running, queued):
        assert (await one.result())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_idle_server_pauses_at_once(client: Client):
    began = trio.current_time()
    await client.call("/pause_generation", {"mode": "abort"})

    assert trio.current_time() == began


async def test_retracted_requests_go_on_with_the_new_weights(client: Client):
    pending = client.start(max_new_tokens=6)
    await steps(2.5)
    await client.call("/pause_generation", {"mode": "retract"})
    assert client.server.statistics().running == 0
    assert (await client.call("/flush_cache", {})).status == 200
    await client.call("/update_weight_version", {"new_version": "w2", "abort_all_requests": False})
    await steps(50)
    await client.call("/continue_generation", {})
    answer = await pending.result()
    meta = answer["meta_info"]

    assert meta["num_retractions"] == 1
    assert [(span["version"], span["start"]) for span in meta["weight_versions"]] == [("default", 0), ("w2", 3)]
    assert meta["weight_versions"][-1]["end"] == len(answer["output_ids"]) == 6
    assert meta["weight_version"] == "w2"


async def test_a_paused_server_reports_the_load_it_had_before(client: Client):
    pending = client.start(max_new_tokens=10)
    await steps(2.5)
    await client.call("/pause_generation", {"mode": "retract"})
    load = (await client.call("/v1/loads")).json["loads"][0]
    await client.call("/continue_generation", {})

    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (1, 0)
    assert client.server.statistics().waiting == 1
    await pending.result()


async def test_a_retraction_answers_503_where_the_queue_is_too_short(open_client):
    async with open_client(max_running=2, max_queued=1) as client:
        kept = client.start(max_new_tokens=10)
        await steps(1)
        lost = client.start(max_new_tokens=10)
        await steps(3)
        await client.call("/pause_generation", {"mode": "retract"})
        await lost.done.wait()
        await client.call("/continue_generation", {})

        assert lost.answer.status == 503
        assert lost.answer.json["message"] == "The request queue is full."
        assert (await kept.result())["meta_info"]["num_retractions"] == 1


async def test_in_place_the_cache_cannot_be_flushed(client: Client):
    pending = client.start(max_new_tokens=6)
    await steps(2.5)
    await client.call("/pause_generation", {"mode": "in_place"})
    refused = await client.call("/flush_cache", {})
    await client.call("/continue_generation", {})

    assert (refused.status, refused.body) == (400, b"Flush cache failed.\n")
    assert (await pending.result())["meta_info"]["num_retractions"] == 0


async def test_probes_while_paused(client: Client):
    await client.call("/pause_generation", {"mode": "in_place"})
    assert [(await client.call(path)).status for path in ("/ready", "/ping")] == [503, 200]
    began = trio.current_time()
    assert (await client.call("/health")).status == 503
    assert trio.current_time() - began == 20.0
    await client.call("/continue_generation", {})

    assert [(await client.call(path)).status for path in ("/ready", "/ping")] == [503, 503], (
        "it counts as unhealthy now"
    )
    began = trio.current_time()
    assert (await client.call("/health_generate")).status == 200
    assert trio.current_time() - began == 1.0
    assert (await client.call("/ready")).status == 200


async def test_a_busy_server_is_healthy_without_a_token_of_the_probes(client: Client):
    pending = client.start(max_new_tokens=4)
    await steps(1.5)
    assert (await client.call("/health")).status == 200
    await pending.result()
    assert client.server.statistics().active == 0


async def test_a_plain_call_whose_client_has_gone_is_noticed_at_the_next_look(client: Client):
    stream = await client.begin(max_new_tokens=500)
    await steps(2.5)
    await stream.aclose()
    await steps(1)
    assert client.server.statistics().running == 1
    await steps(3)
    assert client.server.statistics().running == 0


async def test_a_stream_whose_client_has_gone_is_aborted_at_once(client: Client):
    stream = await client.begin(max_new_tokens=500, stream=True)
    await steps(2.5)
    await stream.aclose()
    await steps(1.1)
    assert (client.server.statistics().running, client.server.statistics().active) == (0, 0)


async def test_the_queue_is_counted_before_a_step_takes_from_it(client: Client):
    await client.generate(max_new_tokens=1)
    burst = [client.start(max_new_tokens=20) for _ in range(6)]
    await steps(5)
    refused = [one.answer for one in burst if one.answer is not None]

    assert len(refused) == 4, "two slots are free, and yet only two of the burst fit"
    for answer in refused:
        assert answer.status == 503
        message = {
            "object": "error",
            "message": "The request queue is full.",
            "type": "503",
            "param": None,
            "code": 503,
        }
        assert answer.json == message


async def test_a_stream_that_finds_the_queue_full_is_a_200_with_one_chunk(client: Client):
    for _ in range(2):
        client.start(max_new_tokens=30)
    await steps(2)
    for _ in range(2):
        client.start(max_new_tokens=1)
    await steps(1)
    (chunk,) = await client.chunks()

    assert chunk["meta_info"]["finish_reason"] == {
        "type": "abort",
        "status_code": 503,
        "message": "The request queue is full.",
    }


async def test_an_active_rid_is_refused_and_free_afterwards(client: Client):
    pending = client.start(rid="d", max_new_tokens=5)
    await steps(2)
    refused = await client.call("/generate", {"rid": "d", "input_ids": PROMPT})
    await pending.result()

    assert refused.status == 400
    assert refused.json == {"error": {"message": "Duplicate request ID detected: d"}}
    assert (await client.generate(rid="d"))["meta_info"]["id"] == "d"


async def test_errors_of_a_stream_come_as_200(client: Client):
    (chunk,) = await client.chunks(temperature=-1)

    assert chunk["error"] == {
        "message": "temperature must be a non-negative finite number, got -1.0.",
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }


async def test_an_unpaused_update_waits_for_everything_in_flight_and_holds_up_what_comes_after(
    client: Client, tmp_path, nursery
):
    weights = client.server.model.save(tmp_path / "w.npz")
    first = client.start(max_new_tokens=10)
    await steps(2)
    updated = trio.Event()

    async def update() -> None:
        body = {"model_path": str(weights), "weight_version": "w2"}
        assert (await client.call("/update_weights_from_disk", body)).json["success"] is True
        updated.set()

    nursery.start_soon(update)
    await steps(1)
    second = client.start(max_new_tokens=3)
    await steps(2)
    assert not updated.is_set()
    assert client.server.statistics().running == 1, "the second one waits behind the update"
    assert (await first.result())["meta_info"]["weight_version"] == "default"
    await updated.wait()
    assert (await second.result())["meta_info"]["weight_version"] == "w2"


async def test_a_paused_update_is_immediate_and_says_when_the_cache_stayed(client: Client, tmp_path):
    weights = client.server.model.save(tmp_path / "w.npz")
    pending = client.start(max_new_tokens=10)
    await steps(2)
    await client.call("/pause_generation", {"mode": "in_place"})
    answer = await client.call("/update_weights_from_disk", {"model_path": str(weights), "weight_version": "w2"})
    assert answer.status == 400
    assert answer.json["message"].startswith("Weights were updated, but the cache was not flushed")
    assert client.server.statistics().weight_version == "w2"
    await client.call("/continue_generation", {})
    await pending.result()


async def test_update_weight_version_aborts_everything_unless_told_not_to(client: Client):
    pending = client.start(max_new_tokens=100)
    await steps(2)
    answer = await client.call("/update_weight_version", {"new_version": "v7"})

    assert answer.json == {"success": True, "message": "Weight version updated to v7", "new_version": "v7"}
    assert (await pending.result())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_flush_waits_for_an_idle_server_as_long_as_it_was_told_to(client: Client, nursery):
    pending = client.start(max_new_tokens=10)
    await steps(2)
    late = await client.call("/flush_cache?timeout=3", {})
    assert (late.status, late.body) == (400, b"Timed out waiting for idle state.")

    nursery.start_soon(client.call, "/flush_cache?timeout=100", {})
    await steps(1)
    second = await client.call("/flush_cache?timeout=3", {})
    assert (second.status, second.body) == (400, b"Another flush_cache is already in progress.")
    await pending.result()
    assert (await client.call("/flush_cache", {})).body.startswith(b"Cache flushed.")


async def test_a_token_outside_the_vocabulary_kills_the_server(client: Client):
    stream = await client.begin(max_new_tokens=100)
    await steps(2)
    victim = await client.begin(input_ids=[5, 1_000_000])
    with trio.fail_after(5):
        assert await stream.receive_some(100) == b""
        assert await victim.receive_some(100) == b""

    assert client.server.dead.is_set()
    assert "1000000" in str(client.server.failure)


@pytest.mark.parametrize("token", [1_000_000, -3])
async def test_f114_a_stop_token_outside_the_vocabulary_kills_the_server_with_min_new_tokens(client: Client, token):
    """A real SGLang's scheduler dies of it."""
    assert (await client.generate(max_new_tokens=2, stop_token_ids=[token], ignore_eos=False))["output_ids"]
    victim = await client.begin(max_new_tokens=4, min_new_tokens=2, stop_token_ids=[token], ignore_eos=False)
    with trio.fail_after(5):
        assert await victim.receive_some(100) == b""

    assert client.server.dead.is_set()
    assert str(token) in str(client.server.failure)


async def test_several_samples_have_new_rids_and_share_the_prompt(client: Client):
    answers = await client.generate(rid="mine", n=2, max_new_tokens=3)

    assert len(answers) == 2
    assert len({answer["meta_info"]["id"] for answer in answers} | {"mine"}) == 3
    assert {answer["meta_info"]["cached_tokens"] for answer in answers} == {len(PROMPT) - 1}


async def test_a_batch_with_one_rid_numbers_it(client: Client):
    answers = await client.generate(rid="b", input_ids=[[1, 2], [3]], max_new_tokens=2)

    assert [answer["meta_info"]["id"] for answer in answers] == ["b_0", "b_1"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 1]


async def test_the_chunks_of_a_batch_are_numbered(client: Client):
    chunks = await client.chunks(input_ids=[[1, 2], [3]], max_new_tokens=3)
    last = {chunk["index"]: chunk for chunk in chunks}

    assert sorted(last) == [0, 1]
    assert all(chunk["meta_info"]["finish_reason"] == {"type": "length", "length": 3} for chunk in last.values())


async def test_a_second_request_on_one_connection_is_answered(client: Client):
    body = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}).encode()
    one = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    stream = await client.begin(max_new_tokens=1)
    async with stream:
        await stream.send_all(one)
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 2:
            received += await stream.receive_some(65536)


async def test_a_routers_http2_preface_does_no_harm(client: Client):
    stream = await client.begin(max_new_tokens=1)
    async with stream:
        await stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        received = b""
        while chunk := await stream.receive_some(65536):
            received += chunk

    assert b"HTTP/1.1 400" in received
    assert (await client.call("/ready")).status == 200
