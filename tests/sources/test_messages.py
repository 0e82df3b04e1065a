"""Messages and tools reach the model in one form, from a file, from a program and from an agent."""

import json
import random
import re
from contextlib import asynccontextmanager

import pytest

from trio_rollout import IterableSource, JsonlSource, Prompt, open_sglang_servers
from trio_rollout.errors import RequestRejected, SourceError
from trio_rollout.gateway._openai_chat import ChatCompletions
from trio_rollout.testing import FakeSGLang, open_sim_net
from trio_rollout.tiny import DATA
from trio_rollout.tokenizer import load_tokenizer

from ._files import written

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CONVERSATION = [
    {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "input_text", "text": "brief"}]},
    {"role": "user", "content": [{"type": "text", "text": "what is 1 + 2?"}], "name": None},
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL], "function_call": None},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    {"role": "assistant", "tool_calls": None, "content": "3"},
    {"role": "user", "content": "thanks"},
]
"""OpenAI's form, as its clients and data sets write it."""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DATA)


@asynccontextmanager
async def open_servers(tokenizer):
    """Open a client with a tokenizer, over one fake server in memory."""
    fake = FakeSGLang(url="http://fake:1")
    async with (
        open_sim_net({fake.url: fake.serve}, rng=random.Random(0)) as net,
        open_sglang_servers([fake.url], tokenizer=tokenizer, connect=net.connect) as servers,
    ):
        yield servers


async def from_file(path, line, **options):
    """Return the prompt of a file with this line."""
    (prompt,) = await JsonlSource(written(path / "a.jsonl", [line]), **options).take(1)
    return prompt


@pytest.mark.parametrize("given", [None, [TOOL]])
async def test_f161_messages_from_every_way_in_become_the_same_ids(tmp_path, tokenizer, autojump_clock, given):
    """A file and a program give what an agent's request gives, with and without tools."""
    body = {"messages": CONVERSATION, "model": "m", **({"tools": given} if given else {})}
    asked = ChatCompletions().request(json.dumps(body).encode())
    expected = tokenizer.render_chat(asked.messages, asked.tools or None)
    by_file = await from_file(tmp_path, {"prompt": CONVERSATION, "tools": given})
    (by_program,) = await IterableSource([Prompt(id="0", messages=CONVERSATION, tools=given or ())]).take(1)

    async with open_servers(tokenizer) as servers:
        for prompt in (by_file, by_program):
            assert tokenizer.decode(servers.encode(prompt)) == expected

    assert prompt.messages == tuple(CONVERSATION), "an agent sends the messages on as they were given"
    assert "None" not in expected
    assert "'type'" not in expected
    assert '\\"a\\"' not in expected


WRONG = {
    "an image": (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        "of type 'image_url'",
    ),
    "a part that is a text": ({"role": "user", "content": ["hi"]}, "content 'hi' can't be tokenized"),
    "a part without a type": ({"role": "user", "content": [{"text": "hi"}]}, "can't be tokenized"),
    "a part whose text is none": (
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        "'text' must be a string",
    ),
    "a number": ({"role": "user", "content": 5}, "the content must be a text or a list of parts, got 5"),
    "an object": ({"role": "user", "content": {"text": "x"}}, "the content must be a text or a list of parts"),
    "no role": ({"content": "hi"}, "lacks a 'role' that is a string"),
    "a role that is a number": ({"role": 5, "content": "hi"}, "lacks a 'role' that is a string"),
    "calls that are no list": ({"role": "assistant", "tool_calls": {"function": {}}}, "'tool_calls' must be a list"),
    "a call without a function": (
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
        "tool call 0 lacks a 'function'",
    ),
    "a call without a name": ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool call 0 lacks a 'name'"),
    "arguments in a list": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
        "'arguments' must be an object, or JSON text, got [1]",
    ),
    "the former form of a call": (
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        "'function_call' is OpenAI's former form",
    ),
    "thoughts that are no text": (
        {"role": "assistant", "reasoning_content": ["x"]},
        "'reasoning_content' must be a string",
    ),
}


@pytest.mark.parametrize("what", WRONG)
async def test_f161_messages_that_cannot_be_read_are_refused_with_their_line(tmp_path, tokenizer, autojump_clock, what):
    """A file is refused before anything is sent; a program's prompt when it is encoded."""
    message, words = WRONG[what]
    messages = [{"role": "user", "content": "hi"}, message]
    path = written(tmp_path / "a.jsonl", [{"prompt": "fine"}, {"prompt": messages}])

    with pytest.raises(SourceError, match=re.escape(words)) as caught:
        await JsonlSource(path).check()
    assert f"{path}, line 2: message 1 under 'prompt'" in str(caught.value)

    async with open_servers(tokenizer) as servers:
        with pytest.raises(RequestRejected, match=re.escape(words)):
            servers.encode(Prompt(id="7", messages=messages))


async def test_f161_members_that_templates_of_some_models_read_are_kept(tmp_path, autojump_clock):
    prompt = await from_file(tmp_path, {"prompt": [{"role": "user", "content": "hi", "lang": "de"}]})
    assert prompt.messages == ({"role": "user", "content": "hi", "lang": "de"},)


TOOLS = {
    "a list": [TOOL],
    "JSON text, as slime's data sets have it": json.dumps([TOOL]),
    "without the outer level": [{"type": "function", **TOOL["function"]}],
}


@pytest.mark.parametrize("what", TOOLS)
async def test_f162_the_tools_of_a_line_reach_the_model(tmp_path, tokenizer, autojump_clock, what):
    messages = [{"role": "user", "content": "hi"}]
    prompt = await from_file(tmp_path, {"prompt": messages, "functions": TOOLS[what]}, tools_key="functions")
    async with open_servers(tokenizer) as servers:
        text = tokenizer.decode(servers.encode(prompt))
    shown = {"name": "add", "description": "", "parameters": TOOL["function"]["parameters"]}
    assert text == tokenizer.render_chat(messages, [{"type": "function", "function": shown}])


WRONG_TOOLS = {
    "an object": ({"name": "f"}, "must be a list of tools"),
    "a text": ("calculator", "a text that is not JSON"),
    "a tool that is a text": (["f"], "tool 0 must be an object, got 'f'"),
    "no name": ([{"type": "function", "function": {}}], "tool 0 lacks a 'name'"),
    "another type": ([{"type": "web_search"}], "tool 0: type 'web_search' can't be shown"),
    "parameters": ([{"name": "f", "parameters": "x"}], "tool 0: 'parameters' must be an object"),
}


@pytest.mark.parametrize("what", WRONG_TOOLS)
async def test_f162_tools_that_cannot_be_read_are_refused_with_key_and_line(tmp_path, what):
    tools, words = WRONG_TOOLS[what]
    path = written(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "tools": tools}])
    with pytest.raises(SourceError, match=re.escape(words)) as caught:
        await JsonlSource(path).check()
    assert "line 1: the tools under 'tools'" in str(caught.value)


@pytest.mark.parametrize("prompt", ["hi", [1, 2]])
async def test_f162_tools_beside_a_prompt_that_no_template_writes_are_refused(tmp_path, prompt):
    path = written(tmp_path / "a.jsonl", [{"prompt": prompt, "tools": [TOOL]}])
    with pytest.raises(SourceError, match="line 1: the tools under 'tools' need a prompt of messages under 'prompt'"):
        await JsonlSource(path).check()
    assert await JsonlSource(path, tools_key=None).take(1), "they may be left out on purpose"
    with pytest.raises(ValueError, match="prompt '1': tools need messages"):
        Prompt(id="1", text="hi", tools=[TOOL])


@pytest.mark.parametrize("nothing", [None, [], "[]"])
async def test_f162_a_line_may_have_no_tools(tmp_path, nothing):
    prompt = await from_file(tmp_path, {"prompt": "hi", "tools": nothing})
    assert prompt.tools == ()


async def test_f162_a_tools_key_that_was_named_must_be_on_every_line(tmp_path):
    with pytest.raises(SourceError, match="line 1: lacks the key 'functions'"):
        await from_file(tmp_path, {"prompt": "hi"}, tools_key="functions")
