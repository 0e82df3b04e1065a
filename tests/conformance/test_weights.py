"""Other weights: which tokens they sampled can be told from the spans."""

import pytest

from ._server import PROMPT, Server, tiles

LENGTH = 300  # three seconds: there is time to see it running, and to interrupt it
RUNNING = {"max_new_tokens": LENGTH, "ignore_eos": True, "return_logprob": True}


async def load(server: Server, which: int, version: str, **more: object) -> None:
    """Load one of the two sets of weights, which must succeed."""
    response = await server.post(
        "/update_weights_from_disk", model_path=str(server.target.weights[which]), weight_version=version, **more
    )
    assert response.status_code == 200, response.text
    assert response.json()["success"] is True
    assert version in response.json()["message"]
    assert await server.version() == version


async def test_weights_from_disk_change_the_model(server: Server):
    tokens = [11, 12, 13, 14]
    await load(server, 0, "1")
    first = await server.log_probs(PROMPT, tokens)
    await load(server, 1, "2")
    second = await server.log_probs(PROMPT, tokens)
    await load(server, 0, "3")

    assert second != pytest.approx(first, abs=0.01)
    assert await server.log_probs(PROMPT, tokens) == pytest.approx(first, abs=1e-4)


async def test_each_token_was_sampled_by_the_weights_its_span_names(server: Server):
    await load(server, 0, "10")
    (running,) = await server.send_and_wait(**RUNNING)
    await server.post("/pause_generation", mode="retract")
    await load(server, 1, "11")
    await server.post("/continue_generation")
    answer = await running.answer()
    meta = answer["meta_info"]
    cut = meta["weight_versions"][0]["end"]

    assert meta["weight_versions"] == [
        {"version": "10", "start": 0, "end": cut},
        {"version": "11", "start": cut, "end": LENGTH},
    ]
    sampled = [triple[0] for triple in meta["output_token_logprobs"]]
    newer = await server.log_probs(PROMPT, answer["output_ids"])
    assert sampled[cut:] == pytest.approx(newer[cut:], abs=1e-4)
    await load(server, 0, "12")
    older = await server.log_probs(PROMPT, answer["output_ids"])
    assert sampled[:cut] == pytest.approx(older[:cut], abs=1e-4)


async def test_an_update_without_a_pause_waits_for_what_runs(server: Server):
    await load(server, 0, "20")
    (running,) = await server.send_and_wait(**RUNNING)
    await load(server, 0, "21")

    assert running.is_done
    assert [span["version"] for span in (await running.answer())["meta_info"]["weight_versions"]] == ["20"]


async def test_a_version_alone_can_be_named_and_aborts_by_default(server: Server):
    (running,) = await server.send_and_wait(**RUNNING)
    response = await server.post("/update_weight_version", new_version="30")
    answer = await running.answer()

    assert response.json() == {"success": True, "message": "Weight version updated to 30", "new_version": "30"}
    assert await server.version() == "30"
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert tiles(answer["meta_info"]["weight_versions"], len(answer["output_ids"]))


async def test_weights_that_are_not_there_change_nothing(server: Server):
    before = await server.version()
    response = await server.post("/update_weights_from_disk", model_path="/no/such/model", weight_version="40")

    assert response.status_code == 400
    assert response.json()["success"] is False
    assert response.json()["message"]
    assert await server.version() == before
    assert len((await server.generate(max_new_tokens=1, ignore_eos=True))["output_ids"]) == 1
