"""An answer in pieces: by default each piece holds everything so far."""

from itertools import pairwise

from ._server import Server, tiles


async def test_chunks_are_cumulative_and_the_last_one_is_the_answer(server: Server):
    chunks = await server.stream(max_new_tokens=10, ignore_eos=True, return_logprob=True, rid="5" * 32)
    last = chunks[-1]

    assert len(chunks) > 1
    for chunk, after in pairwise(chunks):
        assert after["output_ids"][: len(chunk["output_ids"])] == chunk["output_ids"]
        assert chunk["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in chunk["meta_info"]
        assert "e2e_latency" not in chunk["meta_info"]
    for chunk in chunks:
        meta = chunk["meta_info"]
        assert meta["id"] == "5" * 32
        assert len(chunk["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
    assert tiles(last["meta_info"]["weight_versions"], 10)
    assert last["text"].startswith(chunks[0]["text"].rstrip("\N{REPLACEMENT CHARACTER}"))


async def test_a_stream_says_the_same_as_a_plain_answer(server: Server):
    plain = await server.generate(temperature=0, max_new_tokens=10, ignore_eos=True)
    chunks = await server.stream(temperature=0, max_new_tokens=10, ignore_eos=True)

    assert (chunks[-1]["text"], chunks[-1]["output_ids"]) == (plain["text"], plain["output_ids"])


async def test_an_aborted_stream_ends_as_every_stream_does(server: Server):
    async def abort() -> None:
        await server.until(lambda load: load["num_running_reqs"] == 1)
        await server.post("/abort_request", rid="6" * 32)

    server.nursery.start_soon(abort)
    chunks = await server.stream(max_new_tokens=2000, ignore_eos=True, return_logprob=True, rid="6" * 32)
    last = chunks[-1]

    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) == len(last["meta_info"]["output_token_logprobs"]) < 2000
