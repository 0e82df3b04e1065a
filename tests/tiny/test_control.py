"""The routes besides /generate, as far as they answer at once."""

import json

import pytest
import trio

from trio_rollout.errors import SettingsError
from trio_rollout.tiny import DATA, TinyModel

from ._client import PROMPT, Client

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read", "bash")]


async def test_model_info_leads_to_a_config_and_a_tokenizer(client: Client):
    info = (await client.call("/model_info")).json

    assert info["model_path"] == info["served_model_name"] == info["tokenizer_path"] == str(DATA)
    assert info["weight_version"] == "default"
    assert json.loads((DATA / "config.json").read_text())["vocab_size"] == client.server.model.vocab
    assert (await client.call("/get_model_info")).json == info


async def test_a_vocabulary_of_another_size_gets_its_config(open_client):
    async with open_client(vocab=16) as client:
        folder = (await client.call("/model_info")).json["model_path"]
        config = await trio.Path(folder, "config.json").read_text(encoding="utf-8")
        assert json.loads(config)["vocab_size"] == 16
        answer = await client.generate(max_new_tokens=50, ignore_eos=False)
        assert max(answer["output_ids"]) < 16


async def test_server_info_says_what_a_client_wants_to_know(open_client):
    async with open_client(incremental=True, max_running=3, max_queued=9, context_length=70_000) as client:
        info = (await client.call("/server_info")).json

    assert info["incremental_streaming_output"] is True
    assert (info["max_running_requests"], info["max_queued_requests"], info["context_length"]) == (3, 9, 70_000)
    assert info["max_req_input_len"] < 70_000
    assert info["version"] == "0.5.23"


async def test_loads_count_what_runs_and_what_waits(client: Client):
    for _ in range(2):
        client.start(max_new_tokens=30)
    await trio.sleep(2)
    client.start(max_new_tokens=30)
    await trio.sleep(2)
    load = (await client.call("/v1/loads?include=core,queues")).json["loads"][0]

    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["queues"]["waiting"]) == (2, 1, 1)
    assert load["max_running_requests"] == 2


async def test_weights_from_disk_are_used_and_named(client: Client, tmp_path):
    other = TinyModel.random(vocab=client.server.model.vocab, seed=99)
    folder = other.save(tmp_path / "v8")
    updated = await client.call("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "v8"})
    answer = await client.generate(return_logprob=True)
    scores = [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]]

    assert updated.json == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to v8.",
        "num_paused_requests": 0,
    }
    assert scores == pytest.approx(other.log_probs(PROMPT + answer["output_ids"], 4).tolist(), abs=1e-5)
    assert answer["meta_info"]["weight_version"] == "v8"
    info = (await client.call("/model_info")).json
    assert (info["weight_version"], info["model_path"]) == ("v8", str(folder))


@pytest.mark.parametrize("content", [None, b"", b"not an archive"])
async def test_weights_that_cannot_be_read_are_a_400_and_change_nothing(client: Client, tmp_path, content):
    path = tmp_path / "weights.npz"
    if content is not None:
        path.write_bytes(content)
    before = client.server.model
    failed = await client.call("/update_weights_from_disk", {"model_path": str(path), "weight_version": "v9"})

    assert failed.status == 400
    assert failed.json["success"] is False
    assert str(path) in failed.json["message"]
    assert client.server.model is before
    assert (await client.call("/model_info")).json["weight_version"] == "default"


async def test_tool_calls_are_found_in_a_text(client: Client):
    text = 'Let me see.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    text += '\n<tool_call>\n{"name": "unknown"}\n</tool_call>\n<tool_call>\nno JSON\n</tool_call>'
    parsed = await client.call("/parse_function_call", {"text": text, "tools": TOOLS, "tool_call_parser": "qwen25"})

    assert parsed.json == {
        "normal_text": "Let me see.",
        "calls": [{"tool_index": 1, "name": "bash", "parameters": '{"command": "ls"}'}],
    }


@pytest.mark.parametrize("tools", [TOOLS, []])
async def test_a_text_without_calls_is_all_text(client: Client, tools):
    body = {"text": " just words ", "tools": tools, "tool_call_parser": "qwen25"}

    assert (await client.call("/parse_function_call", body)).json == {"normal_text": " just words ", "calls": []}


async def test_the_parser_must_be_named(client: Client, caplog):
    answer = await client.call("/parse_function_call", {"text": "x", "tools": TOOLS})

    assert (answer.status, answer.body) == (500, b"Internal Server Error")


@pytest.mark.parametrize(
    ("parser", "text", "thoughts", "rest"),
    [
        ("qwen3", "<think>hm</think>\n\nyes", "hm", "\n\nyes"),
        ("qwen3", "plain", "", "plain"),
        ("qwen3", "<think>cut of", "cut of", ""),
        ("deepseek-r1", "hm</think>yes", "hm", "yes"),
        ("deepseek-r1", "cut of", "cut of", ""),
    ],
)
async def test_thoughts_are_separated(client: Client, parser, text, thoughts, rest):
    answer = await client.call("/separate_reasoning", {"text": text, "reasoning_parser": parser})

    assert answer.json == {"reasoning_text": thoughts, "text": rest}


async def test_an_unknown_reasoning_parser_is_an_error(client: Client, caplog):
    answer = await client.call("/separate_reasoning", {"text": "x", "reasoning_parser": "other"})

    assert (answer.status, answer.body) == (500, b"Internal Server Error")


async def test_a_server_can_be_slowed_down(client: Client):
    await client.call("/slow_down", {"forward_sleep_time": 10.0})
    answer = await client.generate(max_new_tokens=3)

    assert 20.0 <= answer["meta_info"]["e2e_latency"] <= 30.0


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory_occupation"])
async def test_memory_calls_are_taken(client: Client, path):
    answer = await client.call(path, {})

    assert (answer.status, answer.json) == (200, None)


async def test_wrong_paths_and_methods(client: Client):
    assert [(await client.call(path)).status for path in ("/get_load", "/generate", "/pause_generation")] == [
        404,
        405,
        405,
    ]
    assert (await client.call("/health", method="HEAD")).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", b""),
        ("/pause_generation", {"mode": "never"}),
        ("/update_weight_version", {}),
        ("/flush_cache?timeout=soon", {}),
        ("/abort_request", b"{"),
    ],
)
async def test_a_control_call_that_makes_no_sense(client: Client, path, body):
    answer = await client.call(path, body)

    assert answer.status == 400
    assert answer.json["object"] == "error"


async def test_a_small_context_refuses_what_does_not_fit(open_client):
    async with open_client(context_length=16) as client:
        too_long = await client.call("/generate", {"input_ids": [1] * 16})
        too_many = await client.call("/generate", {"input_ids": [1] * 8, "sampling_params": {"max_new_tokens": 9}})
        fits = await client.generate(input_ids=[1] * 8, max_new_tokens=8)
        open_end = await client.generate(input_ids=[1] * 8, max_new_tokens=None)

    assert "longer than the model's context length (16 tokens)" in too_long.json["error"]["message"]
    assert "Requested token count exceeds the model's maximum context length" in too_many.json["error"]["message"]
    assert len(fits["output_ids"]) == 8
    assert len(open_end["output_ids"]) == 7


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": PROMPT, "sampling_params": {"stop_regex": "("}}, "invalid stop_regex '('"),
        ({"input_ids": PROMPT, "sampling_params": {"json_schema": "{}"}}, "--grammar-backend none"),
        (
            {"input_ids": PROMPT, "sampling_params": {"logit_bias": {"4096": 1.0}}},
            "logit_bias must has keys in [0, 1023]",
        ),
        (
            {"input_ids": PROMPT, "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}},
            "min_new_tokens must be in",
        ),
        (
            {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 9},
            "higher than the number of input tokens",
        ),
        ({"input_ids": PROMPT, "return_logprob": True, "token_ids_logprob": [5000]}, "token_ids_logprob must lie in"),
        ({"input_ids": PROMPT, "return_hidden_states": True}, "not configured to return hidden states"),
        ({"input_ids": [PROMPT, PROMPT], "rid": ["one"]}, "rids length 1 mismatch"),
        ({"input_ids": [PROMPT, PROMPT], "return_logprob": [True]}, "must be equal to the batch size"),
        ({"input_ids": [PROMPT, PROMPT], "rid": ["same", "same"]}, "Duplicate request ID"),
        ({"text": []}, "text cannot be empty"),
        ({"text": ""}, "no tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_words(client: Client, body, words):
    answer = await client.call("/generate", body)

    assert answer.status == 400
    assert words in answer.json["error"]["message"]


@pytest.mark.parametrize("settings", [{"weights": "none.npz"}, {"script": "none.toml"}])
async def test_files_that_cannot_be_read_are_named(open_client, settings):
    with pytest.raises(SettingsError, match=r"TinySettings\.\w+: cannot use none"):
        async with open_client(**settings):
            pytest.fail("it must not start")
