"""An aborted request comes back with the tokens that it has, and its slot is free."""

import trio

from ._server import PROMPT, Server, tiles

# Twenty seconds alone; eight of them fit into the real server's memory of 8,192 tokens.
LONG = {"max_new_tokens": 2000, "ignore_eos": True, "return_logprob": True}
CROWD = {**LONG, "max_new_tokens": 1000}  # eight of them fill the KV pool of the real server


async def test_an_abort_returns_the_partial_answer(server: Server):
    (running,) = await server.send_and_wait(rid="a" * 32, **LONG)
    aborted = await server.post("/abort_request", rid="a" * 32)
    answer = await running.answer()
    meta = answer["meta_info"]

    assert (aborted.status_code, aborted.content) == (200, b"")
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 2000
    assert tiles(meta["weight_versions"], len(answer["output_ids"]))
    await server.until_idle()


async def test_the_partial_answers_log_probs_are_right(server: Server):
    (running,) = await server.send_and_wait(rid="a" * 32, **LONG)
    await server.post("/abort_request", rid="a" * 32)
    answer = await running.answer()

    sampled = [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]]
    scored = await server.log_probs(PROMPT, answer["output_ids"])
    assert max(abs(one - other) for one, other in zip(sampled, scored, strict=True)) < 1e-4


async def test_an_abort_in_the_queue_returns_no_tokens_and_less_about_them(server: Server):
    await server.send_and_wait(8, **CROWD)
    queued = server.send(rid="e" * 32, **CROWD)
    await server.until(lambda load: load["num_waiting_reqs"] == 1)
    await server.post("/abort_request", rid="e" * 32)
    answer = await queued.answer()

    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & answer["meta_info"].keys()


async def test_an_abort_takes_longer_rids_with_it(server: Server):
    """It matches by prefix, if there is a request of this very rid; so rids should all be of one length."""
    pending = {rid: server.send(rid=rid, **CROWD) for rid in ("ab", "ab2", "b")}
    await server.until(lambda load: load["num_running_reqs"] == 3)
    await server.post("/abort_request", rid="ab")
    ends = [(await pending[rid].answer())["meta_info"]["finish_reason"]["type"] for rid in ("ab", "ab2")]

    assert ends == ["abort", "abort"]
    assert not pending["b"].is_done


async def test_a_prefix_alone_is_nobodys_rid(server: Server):
    (running,) = await server.send_and_wait(rid="ab2", **CROWD)
    await server.post("/abort_request", rid="ab")
    await trio.sleep(0.3)

    assert not running.is_done


async def test_abort_all_leaves_nothing(server: Server):
    running = await server.send_and_wait(3, **CROWD)
    await server.post("/abort_request", abort_all=True)

    assert [(await pending.answer())["meta_info"]["finish_reason"]["type"] for pending in running] == ["abort"] * 3
    await server.until_idle()


async def test_an_abort_of_nothing_is_fine(server: Server):
    (running,) = await server.send_and_wait(rid="f" * 32, **LONG)

    for body in ({"rid": "unknown"}, {"rid": ""}, {}):
        response = await server.post("/abort_request", **body)
        assert (response.status_code, response.content) == (200, b"")
    assert not running.is_done


async def test_an_active_rid_is_refused_and_free_again_afterwards(server: Server):
    await server.send_and_wait(rid="d" * 32, **LONG)
    refused = await server.post("/generate", rid="d" * 32, input_ids=PROMPT, sampling_params={"max_new_tokens": 1})
    await server.post("/abort_request", rid="d" * 32)
    await server.until_idle()

    assert refused.status_code == 400
    assert "Duplicate request ID detected" in refused.json()["error"]["message"]
    assert (await server.generate(rid="d" * 32, max_new_tokens=1))["meta_info"]["id"] == "d" * 32


async def test_a_plain_call_whose_client_went_away_frees_its_slot(server: Server):
    """It looks for its client only now and then: every three or four seconds."""
    async with server.hang_up(**LONG):
        await server.until(lambda load: load["num_running_reqs"] == 1)

    with trio.fail_after(10):  # the answer itself takes twice that
        await server.until_idle()


async def test_a_stream_whose_client_went_away_frees_its_slot_at_once(server: Server):
    async with server.hang_up(stream=True, **LONG) as connection:
        received = bytearray()
        while b"data: " not in received:
            received += await connection.receive_some()

    with trio.fail_after(10):
        await server.until_idle()
