"""Three ways to pause. What runs is aborted, put back, or frozen; what comes waits."""

import pytest
import trio

from ._server import Pending, Server, tiles

MODES = ["abort", "retract", "in_place"]
LENGTH = 300  # three seconds: there is time to see it running, and to interrupt it
RUNNING = {"max_new_tokens": LENGTH, "ignore_eos": True, "return_logprob": True}


async def paused(server: Server, mode: str) -> None:
    """Pause, and check the answer."""
    response = await server.post("/pause_generation", mode=mode)
    assert (response.status_code, response.json()["status"]) == (200, "ok")


async def resumed(server: Server) -> None:
    """Continue, and check the answer."""
    response = await server.post("/continue_generation")
    assert (response.status_code, response.json()["status"]) == (200, "ok")


async def interrupted(server: Server, mode: str) -> Pending:
    """A request that was being decoded when the server was paused."""
    (running,) = await server.send_and_wait(**RUNNING)
    await paused(server, mode)
    return running


@pytest.mark.parametrize("mode", MODES)
async def test_a_paused_server_is_up_but_not_ready(server: Server, mode: str):
    await paused(server, mode)
    ready, ping = await server.is_ready(), (await server.http.get("/ping")).status_code
    await resumed(server)

    assert (ready, ping) == (False, 200)
    assert await server.is_ready()


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_to_a_paused_server_waits_until_it_goes_on(server: Server, mode: str):
    await paused(server, mode)
    waiting = server.send(max_new_tokens=2, ignore_eos=True)
    await trio.sleep(0.3)
    was_done = waiting.is_done
    await resumed(server)

    assert not was_done
    assert len((await waiting.answer())["output_ids"]) == 2


async def test_abort_ends_what_runs_before_it_returns(server: Server):
    running = await interrupted(server, "abort")
    with trio.fail_after(30):  # for ever, if it were only put back
        answer = await running.answer()

    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < LENGTH


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
async def test_the_other_modes_go_on_with_what_ran(server: Server, mode: str, retractions: int):
    running = await interrupted(server, mode)
    await trio.sleep(0.3)
    was_done = running.is_done
    await resumed(server)
    answer = await running.answer()

    assert not was_done
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": LENGTH}
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == LENGTH
    assert answer["meta_info"]["num_retractions"] == retractions


@pytest.mark.parametrize(("mode", "status"), [("abort", 200), ("retract", 200), ("in_place", 400)])
async def test_the_cache_can_be_flushed_unless_something_is_frozen(server: Server, mode: str, status: int):
    await interrupted(server, mode)
    response = await server.http.get("/flush_cache")

    assert response.status_code == status
    assert response.text.startswith("Cache flushed." if status == 200 else "Flush cache failed.")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_new_version_splits_the_spans_of_what_ran(server: Server, mode: str):
    before = await server.version()
    after = f"{before}+1"
    running = await interrupted(server, mode)
    named = await server.post("/update_weight_version", new_version=after, abort_all_requests=False)
    await resumed(server)
    meta = (await running.answer())["meta_info"]

    assert named.json() == {"success": True, "message": f"Weight version updated to {after}", "new_version": after}
    assert [span["version"] for span in meta["weight_versions"]] == [before, after]
    assert tiles(meta["weight_versions"], LENGTH)
    assert meta["weight_version"] == after == await server.version()


async def test_an_abort_of_what_came_during_a_pause_is_lost(server: Server):
    """So the client closes its own gate before it pauses, and pays such an abort after the resume."""
    await paused(server, "in_place")
    waiting = server.send(rid="7" * 32, max_new_tokens=2, ignore_eos=True)
    await trio.sleep(0.3)
    aborted = await server.post("/abort_request", rid="7" * 32)
    await resumed(server)

    assert aborted.status_code == 200
    assert (await waiting.answer())["meta_info"]["finish_reason"]["type"] == "length"


async def test_pausing_needs_a_body_and_a_known_mode(server: Server):
    for content in (b"", b'{"mode": "nonsense"}'):
        response = await server.http.post(
            "/pause_generation", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        assert response.json()["object"] == "error"
    assert await server.is_ready()
