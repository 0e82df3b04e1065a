"""Scripted answers of the model, for demonstrations of agents."""

from pathlib import Path

import pytest

from trio_rollout.errors import SettingsError
from trio_rollout.tiny import TinyTokenizer
from trio_rollout.tiny._script import Script

SCRIPT = """
[[rules]]
contains = ["fix the bug", "tests"]
turn = 0
answer = "Let me look."
calls = [{ name = "bash", arguments = { command = "cat main.py" } }]

[[rules]]
last_contains = "<tool_response>"
answer = "It is fixed."

[[rules]]
matches = 'add (\\d+) and (\\d+)'
lacks = "never"
answer = "adding {1} to {2}"
"""


def chat(*messages: str) -> str:
    return "".join(f"<|im_start|>{message}<|im_end|>\n" for message in messages) + "<|im_start|>assistant\n"


@pytest.fixture
def script(tmp_path) -> Script:
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT, encoding="utf-8")
    return Script.load(path)


CALL = 'Let me look.\n<tool_call>\n{"name":"bash","arguments":{"command":"cat main.py"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (chat("user\nPlease fix the bug, the tests fail"), CALL),
        (chat("user\nPlease fix the bug"), None),
        (
            chat("user\nfix the bug tests", f"assistant\n{CALL}", "user\n<tool_response>\nx = 1\n</tool_response>"),
            "It is fixed.",
        ),
        (chat("user\nfix the bug tests", "assistant\nIt is fixed.", "user\nthanks"), None),
        (chat("user\nadd 2 and 40"), "adding 2 to 40"),
        (chat("user\nnever add 2 and 40"), None),
        ("add 1 and 2", "adding 1 to 2"),
    ],
)
def test_the_first_rule_that_fits_answers(script, prompt, answer):
    assert script.answer(prompt) == answer


async def test_a_scripted_answer_is_sampled_with_true_log_probs(open_client, tmp_path):
    path = tmp_path / "script.json"
    path.write_text('{"rules": [{"contains": "weather", "answer": "Rain."}]}', encoding="utf-8")
    prompt = chat("user\nHow is the weather?")
    async with open_client(script=path) as client:
        answer = await client.generate(text=prompt, ignore_eos=False, max_new_tokens=50, return_logprob=True)
        ids = TinyTokenizer.load().encode(prompt)
        expected = client.server.model.log_probs(ids + answer["output_ids"], len(ids))
        other = await client.generate(text="something else", max_new_tokens=4)

    assert answer["text"] == "Rain."
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 258}
    assert [one[0] for one in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(
        expected.tolist(), abs=1e-4
    )
    assert len(other["output_ids"]) == 4


async def test_a_script_keeps_to_the_requests_limit(open_client, tmp_path):
    path = tmp_path / "script.json"
    path.write_text('{"rules": [{"answer": "a long answer that is cut"}]}', encoding="utf-8")
    async with open_client(script=path) as client:
        answer = await client.generate(text="x", max_new_tokens=2)

    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert "a long answer that is cut".startswith(answer["text"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("s.toml", "rules = 3"),
        ("s.toml", "this is no TOML"),
        ("s.json", '{"rules": [{"answer": "x", "unknown": 1}]}'),
        ("s.json", '{"rules": [{"matches": "("}]}'),
        ("s.json", None),
    ],
)
def test_a_script_that_cannot_be_used_is_refused_by_name(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")

    with pytest.raises(SettingsError, match=r"s\.(toml|json)"):
        Script.load(path)


async def test_scripted_tool_calls_survive_the_round_trip(open_client, tmp_path):
    """/parse_function_call finds the calls of the script in the answer."""
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT, encoding="utf-8")
    tools = [{"type": "function", "function": {"name": "bash"}}]
    async with open_client(script=path) as client:
        prompt = chat("user\nfix the bug, run the tests")
        answer = await client.generate(text=prompt, ignore_eos=False, max_new_tokens=200)
        body = {"text": answer["text"], "tools": tools, "tool_call_parser": "qwen25"}
        parsed = (await client.call("/parse_function_call", body)).json

    assert parsed["normal_text"] == "Let me look."
    assert parsed["calls"] == [{"tool_index": 0, "name": "bash", "parameters": '{"command": "cat main.py"}'}]


def test_the_script_of_the_documentation_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "tiny-server.md").read_text(encoding="utf-8")
    path = tmp_path / "script.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    script = Script.load(path)

    assert script.answer(chat("user\nThe tests fail.".lower())) == CALL
    assert script.answer("add 1 and 2") == "adding 1 to 2"
