"""Other weights: which tokens they sampled can be told from the spans."""

import httpx
import pytest

from trio_rollout import (
    EngineSettings,
    IterableSource,
    PauseMode,
    Prompt,
    SamplingParams,
    SingleTurn,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.errors import ServerError

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


@pytest.mark.parametrize("checks", [True, False])
async def test_f140c_a_push_in_place_with_the_default_body_is_told_to_leave_the_cache(
    server: Server, caplog, *, checks: bool
):
    """It answers 400, the weights are new, and the server keeps the old name: the trainer is told to pass flush_cache=false."""
    long = SingleTurn(SamplingParams(max_new_tokens=LENGTH, ignore_eos=True))
    source = IterableSource([Prompt(id=str(number), input_ids=[5, 6, 7 + number]) for number in range(2)])
    settings = EngineSettings(samples_per_prompt=2, max_running=4)
    await load(server, 0, "30")

    async def push(version: int, **more: object) -> None:
        path = str(server.target.weights[1])
        response = await server.post("/update_weights_from_disk", model_path=path, weight_version=str(version), **more)
        if checks:
            response.raise_for_status()

    async with (
        open_sglang_servers([server.target.url]) as servers,
        open_rollout_engine(source, long, servers=servers, settings=settings) as engine,
    ):
        await server.until(lambda now: now["num_running_reqs"] == 4)
        with pytest.raises(httpx.HTTPStatusError if checks else ServerError) as caught:
            async with engine.weight_update(version=31, mode=PauseMode.IN_PLACE):
                await push(31)
        assert "flush_cache=false" in (caplog.text if checks else str(caught.value))
        assert await server.version() == "30"
        assert engine.weight_version == 30
        async with engine.weight_update(version=32, mode=PauseMode.IN_PLACE):
            await push(32, flush_cache=False)
        batch = await engine.next_batch(2)
        spans = [segment.versions for group in batch.groups for row in group.trajectories for segment in row.segments]
        assert {span[-1].version for span in spans} == {32}
        assert {span[0].version for span in spans} == {30}
