"""A session on a real SGLang: recorded log-probs agree with a new prefill, and nothing of a cancelled turn stays."""

import json
import shutil

import httpx
import numpy as np
import openai
import pytest
import trio

from trio_rollout import (
    EngineSettings,
    IterableSource,
    Prompt,
    Retry,
    SamplingParams,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.gateway import GatewaySettings, open_gateway

from .conftest import WEATHER, one

pytestmark = [pytest.mark.real_sglang, pytest.mark.usefixtures("clients_leave_generators")]

TOOLS = [{"type": "function", "function": WEATHER}]


async def running(client, url):
    """Return the number of requests that the server runs or queues."""
    loads = (await client.get(f"{url}/v1/loads?include=core")).json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def rescored(client, url, row):
    """Return the log-probs of a row's response, from a prefill of the whole row."""
    body = {
        "input_ids": row.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = (await client.post(f"{url}/generate", json=body)).raise_for_status().json()
    return np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][-row.response_length :]])


async def cancelled_in_the_second_turn(session, client, url):
    """Stream two turns with tools; leave the second one while it is sampled."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=120) as agent:
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        ask = {"model": "policy", "tools": TOOLS, "stream": True}
        deltas = []
        async with await agent.chat.completions.create(**ask, messages=messages, max_tokens=24) as first:
            async for chunk in first:
                deltas.extend(choice.delta.content or "" for choice in chunk.choices)
        messages += [{"role": "assistant", "content": "".join(deltas)}, {"role": "user", "content": "And in Rome?"}]
        with trio.CancelScope() as second:
            async for _ in await agent.chat.completions.create(**ask, messages=messages, max_tokens=3000):
                if await running(client, url):
                    second.cancel()
        assert second.cancelled_caught


async def asked_for_more_than_fits(session):
    """Send prompts of every length around the longest that the server takes; return the answers' ends by length."""
    ends = {}
    key = {"authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(base_url=session.base_url, headers=key, timeout=120) as agent:
        words = 1
        while True:
            body = {"messages": [{"role": "user", "content": "a " * words}], "max_tokens": 10_000}
            count = (await agent.post("/messages/count_tokens", json=body)).json()["input_tokens"]
            if count >= 4080:
                answer = await agent.post("/messages", json=body)
                assert answer.status_code == 200, answer.text
                ends[count] = (answer.json()["stop_reason"], answer.json()["usage"]["output_tokens"])
            if count >= 4100:
                return ends
            words += max(1, (4080 - count) // 4)


async def test_the_context_can_be_used_up(sglang_url, sglang_weights):
    """The answer is cut to the context that is left, at last to nothing, and never an error."""
    ends = []

    async def generate(prompt, rollout):
        async with rollout.session(sampling=SamplingParams(temperature=1.0, ignore_eos=True)) as session:
            ends.append(await asked_for_more_than_fits(session))
        return session.trajectory()

    with trio.fail_after(300):
        async with (
            open_sglang_servers([sglang_url]) as servers,
            open_gateway(servers, tokenizer=sglang_weights[0]) as gateway,
            open_rollout_engine(
                IterableSource([Prompt(id="0", text="task")]),
                generate,
                servers=servers,
                reward=one,
                gateway=gateway,
                settings=EngineSettings(samples_per_prompt=1, max_running=1, retry=Retry(max_attempts=1)),
            ) as engine,
        ):
            batches = [batch async for batch in engine.batches(1)]
            assert [str(report.error) for report in engine.quarantined()] == []

    answered = {count for count, (reason, tokens) in ends[0].items() if tokens}
    assert {reason for reason, _ in ends[0].values()} == {"max_tokens"}
    assert {4080, 4100} <= {count // 10 * 10 for count in ends[0]}
    assert answered
    assert max(answered) < 4090
    assert batches[0].groups[0].trajectories[0].turns == len(answered)


async def test_two_turns_streamed_with_tools_and_cancelled_in_the_second(sglang_url, sglang_weights):
    async def generate(prompt, rollout):
        async with rollout.session(sampling=SamplingParams(temperature=1.0, ignore_eos=True)) as session:
            await cancelled_in_the_second_turn(session, client, sglang_url)
            with trio.fail_after(20):
                while await running(client, sglang_url):
                    await trio.sleep(0.1)
            assert session.statistics().running == 0
        return session.trajectory()

    with trio.fail_after(300):
        async with (
            httpx.AsyncClient(timeout=120) as client,
            open_sglang_servers([sglang_url]) as servers,
            open_gateway(
                servers, tokenizer=sglang_weights[0], settings=GatewaySettings(tool_parser="qwen25")
            ) as gateway,
            open_rollout_engine(
                IterableSource([Prompt(id="0", text="task")]),
                generate,
                servers=servers,
                reward=one,
                gateway=gateway,
                settings=EngineSettings(samples_per_prompt=1, max_running=1, retry=Retry(max_attempts=1)),
            ) as engine,
        ):
            batches = [batch async for batch in engine.batches(1)]
            assert [str(report.error) for report in engine.quarantined()] == []
            (row,) = batches[0].groups[0].trajectories[0].segments
            again = await rescored(client, sglang_url, row)

    assert row.response_length == 24
    assert row.loss_mask.all()
    assert np.abs(again - row.log_probs).max() < 1e-4


def thinking_weights(weights, folder):
    """Copy a model, with its two last tokens renamed to the marks of thoughts."""
    shutil.copytree(weights, folder)
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text(encoding="utf-8"))
    model = made["model"]
    for token, content in ((2046, "<think>"), (2047, "</think>")):
        name = next(name for name, number in model["vocab"].items() if number == token)
        del model["vocab"][name]
        joined = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        model["merges"] = [
            merge for merge, text in zip(model["merges"], joined, strict=True) if text.replace(" ", "") != name
        ]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        made["added_tokens"].append({"id": token, "content": content, **flags})
    path.write_text(json.dumps(made), encoding="utf-8")
    return folder


async def test_f149_a_json_schema_is_held_behind_the_thoughts(start_sglang, sglang_weights, tmp_path):
    """The answer is JSON, and not the thoughts; with thinking off there are none."""
    folder = thinking_weights(sglang_weights[0], tmp_path / "model")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    said = []

    async def generate(prompt, rollout):
        # The random model closes its thoughts at once, wherever it may.
        sampling = SamplingParams(max_new_tokens=40, extra={"logit_bias": {"2047": 100.0}})
        async with (
            rollout.session(sampling=sampling) as session,
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=300) as agent,
        ):
            ask = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "response_format": form}
            said.append((await agent.chat.completions.create(**ask)).choices[0].message)
            async with agent.chat.completions.stream(**ask) as stream:
                said.append((await stream.get_final_completion()).choices[0].message)
        return session.trajectory()

    flags = ("--model-path", str(folder), "--reasoning-parser", "deepseek-r1", "--grammar-backend", "xgrammar")
    flags += ("--constrained-json-disable-any-whitespace",)
    with start_sglang(*flags) as url, trio.fail_after(300):
        async with (
            open_sglang_servers([url]) as servers,
            open_gateway(servers, tokenizer=folder) as gateway,
            open_rollout_engine(
                IterableSource([Prompt(id="0", text="task")]),
                generate,
                servers=servers,
                reward=one,
                gateway=gateway,
                settings=EngineSettings(samples_per_prompt=1, max_running=1, retry=Retry(max_attempts=1)),
            ) as engine,
        ):
            batches = [batch async for batch in engine.batches(1)]
            assert [str(report.error) for report in engine.quarantined()] == []

    assert len(batches) == 1
    for message in said:
        assert set(json.loads(message.content)) == {"a"}
