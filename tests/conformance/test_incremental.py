"""Streams of deltas, from a server that was started for them; and what kills a server: the last test of its life."""

import httpx
import pytest
import trio

from ._server import PROMPT, Server, request, tiles


async def test_it_says_that_its_streams_are_incremental(doomed_server: Server):
    info = (await doomed_server.http.get("/server_info")).json()

    assert info["incremental_streaming_output"] is True


async def test_deltas_add_up_while_the_counters_count_everything(doomed_server: Server):
    plain = await doomed_server.generate(temperature=0, max_new_tokens=12, ignore_eos=True)
    chunks = await doomed_server.stream(temperature=0, max_new_tokens=12, ignore_eos=True, return_logprob=True)
    ids, log_probs = [], []
    for chunk in chunks:
        ids += chunk["output_ids"]
        log_probs += chunk["meta_info"]["output_token_logprobs"]
        assert chunk["meta_info"]["completion_tokens"] == len(ids)
        assert chunk["meta_info"]["output_token_logprobs_length"] == len(log_probs)

    assert len(chunks) > 1
    assert ids == plain["output_ids"] == [triple[1] for triple in log_probs]
    assert "".join(chunk["text"] for chunk in chunks) == plain["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert tiles(chunks[-1]["meta_info"]["weight_versions"], 12)


async def test_an_aborted_stream_lost_and_repeated_nothing(doomed_server: Server):
    async def abort() -> None:
        await doomed_server.until(lambda load: load["num_running_reqs"] == 1)
        await doomed_server.post("/abort_request", rid="6" * 32)

    doomed_server.nursery.start_soon(abort)
    chunks = await doomed_server.stream(max_new_tokens=2000, ignore_eos=True, return_logprob=True, rid="6" * 32)
    meta = chunks[-1]["meta_info"]

    assert meta["finish_reason"]["type"] == "abort"
    assert sum(len(chunk["output_ids"]) for chunk in chunks) == meta["completion_tokens"] < 2000


async def test_a_token_outside_the_vocabulary_kills_the_server(doomed_server: Server):
    """So the client checks the ids before it sends them."""
    with trio.fail_after(240), pytest.raises(httpx.TransportError):
        response = await doomed_server.post(
            "/generate", **request(input_ids=[*PROMPT, doomed_server.target.vocabulary], max_new_tokens=1)
        )
        pytest.fail(f"it lives: {response.text}")
    with trio.fail_after(240), pytest.raises(httpx.TransportError):
        while True:
            await doomed_server.http.get("/ping")
            await trio.sleep(0.1)
