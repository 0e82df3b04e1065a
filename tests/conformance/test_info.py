"""A server's answers about itself."""

import pytest
import trio

from ._server import Server


async def test_ready_ping_and_health_say_200(server: Server):
    for path in ("/ready", "/ping", "/health", "/health_generate"):
        assert (await server.http.get(path)).status_code == 200


async def test_model_info_names_the_model_and_its_version(server: Server):
    info = (await server.http.get("/model_info")).json()

    assert {"model_path", "served_model_name", "tokenizer_path", "is_generation", "weight_version"} <= info.keys()
    assert isinstance(info["weight_version"], str)
    assert info["is_generation"] is True


async def test_server_info_names_its_limits(server: Server):
    info = (await server.http.get("/server_info")).json()

    assert info["max_running_requests"] == 8
    assert info["max_queued_requests"] == 4
    assert info["incremental_streaming_output"] is False
    assert info["max_req_input_len"] > 1000
    assert isinstance(info["version"], str)
    assert isinstance(info["internal_states"], list)


async def test_loads_count_what_runs_and_what_waits(server: Server):
    await server.send_and_wait(8, max_new_tokens=1000, ignore_eos=True)
    server.send(max_new_tokens=1)
    await server.until(lambda load: load["num_waiting_reqs"] == 1)
    answer = (await server.http.get("/v1/loads", params={"include": "core,queues,memory"})).json()
    (load,) = answer["loads"]

    assert {"timestamp", "version", "loads"} <= answer.keys()
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["dp_rank"]) == (8, 1, 0)
    assert load["max_running_requests"] == 8
    assert load["queues"]["waiting"] == 1
    assert "retracted" in load["queues"]
    assert load["num_used_tokens"] > 0
    assert load["max_total_num_tokens"] > 1000


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_idle_cache_can_be_flushed(server: Server, method: str):
    await server.generate(input_ids=list(range(200, 240)))
    response = await server.http.request(method, "/flush_cache")
    again = await server.generate(input_ids=list(range(200, 240)))

    assert response.status_code == 200
    assert response.text.startswith("Cache flushed.\n")
    assert again["meta_info"]["cached_tokens"] == 0


async def test_a_busy_cache_cannot_be_flushed(server: Server):
    await server.send_and_wait(max_new_tokens=2000, ignore_eos=True)
    at_once = await server.http.get("/flush_cache")
    after_a_while = await server.http.get("/flush_cache", params={"timeout": 0.3})

    assert (at_once.status_code, at_once.text.partition("\n")[0]) == (400, "Flush cache failed.")
    assert after_a_while.status_code == 400
    assert after_a_while.text.startswith("Timed out waiting for idle state.")


async def test_a_flush_with_patience_waits_for_the_end(server: Server):
    (running,) = await server.send_and_wait(max_new_tokens=300, ignore_eos=True)
    with trio.fail_after(60):
        response = await server.http.get("/flush_cache", params={"timeout": 30})

    assert response.status_code == 200
    assert running.is_done or (await running.answer())


async def test_put_is_as_good_as_post(server: Server):
    response = await server.http.put("/generate", json={"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}})

    assert response.status_code == 200
