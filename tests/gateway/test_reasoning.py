"""Reasoning: found by the servers' parser, sent in each protocol's own way, trained like every sampled token."""

import anthropic
import openai
import pytest

from .conftest import WEATHER

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

SCRIPT = """
[[rules]]
last_contains = "<tool_response>"
answer = "<think>22 is warm.</think>It is sunny."

[[rules]]
contains = "weather"
answer = "<think>I have to look.</think>Let me look."
calls = [{ name = "weather", arguments = { city = "Paris" } }]

[[rules]]
contains = "count"
answer = "BEGINI count: one two three four five six seven eight nine ten</think>Counted: one two three four five six seven eight nine ten"

[[rules]]
contains = "endless"
answer = "<think>and then, and then, and then"

[[rules]]
answer = "<think>A greeting.</think>Hello!"
"""
HELLO = [{"role": "user", "content": "say hello"}]
WEATHERS = [{"role": "user", "content": "the weather, please"}]


@pytest.fixture
def script(tmp_path, request):
    path = tmp_path / "thoughts.toml"
    begins_inside = "deepseek" in request.node.name
    path.write_text(SCRIPT.replace("BEGIN", "" if begins_inside else "<think>"), encoding="utf-8")
    return path


@pytest.fixture
def think(run_agent_once):
    async def run(agent):
        return await run_agent_once(agent, tiny={"reasoning_parser": "qwen3", "step_delay": 0.002})

    return run


def openai_of(session):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


def anthropic_of(session):
    return anthropic.AsyncAnthropic(base_url=session.base_url, api_key=session.api_key)


async def test_chat_completions_have_them_beside_the_content(think):
    async def agent(session):
        async with openai_of(session) as client:
            whole = await client.chat.completions.create(model="policy", messages=HELLO)
            assert whole.choices[0].message.content == "Hello!"
            assert whole.choices[0].message.reasoning_content == "A greeting."
            chunks = [
                chunk.choices[0].delta
                async for chunk in await client.chat.completions.create(model="policy", messages=HELLO, stream=True)
            ]
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks) == "A greeting."
            assert "".join(delta.content or "" for delta in chunks) == "Hello!"

    await think(agent)


async def test_messages_have_them_as_blocks(think):
    async def agent(session):
        async with anthropic_of(session) as client:
            ask = {"model": "policy", "max_tokens": 200, "messages": HELLO}
            whole = await client.messages.create(**ask)
            assert [(block.type) for block in whole.content] == ["thinking", "text"]
            async with client.messages.stream(**ask) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_message()
            assert (final.content[0].thinking, final.content[1].text) == ("A greeting.", "Hello!")
            assert "thinking" in kinds

    await think(agent)


async def test_responses_have_them_as_items(think):
    async def agent(session):
        async with openai_of(session) as client:
            whole = await client.responses.create(model="policy", input="say hello")
            assert [item.type for item in whole.output] == ["reasoning", "message"]
            assert whole.output[0].content[0].text == "A greeting."
            assert whole.output_text == "Hello!"
            async with client.responses.stream(model="policy", input="say hello") as stream:
                final = await stream.get_final_response()
            assert [item.type for item in final.output] == ["reasoning", "message"]
            assert final.output_text == "Hello!"

    await think(agent)


@pytest.mark.parametrize("gives_back", [True, False])
async def test_a_tool_loop_with_thoughts_is_one_row_whose_thoughts_are_trained(think, gives_back, tiny_tokenizer):
    """The recorded ids have the thoughts, also if the agent does not send them back."""

    async def agent(session):
        async with openai_of(session) as client:
            ask = {"model": "policy", "tools": [{"type": "function", "function": WEATHER}]}
            first = (await client.chat.completions.create(**ask, messages=WEATHERS)).choices[0].message
            assert (first.reasoning_content, first.content) == ("I have to look.", "Let me look.")
            message = first.model_dump(exclude_none=True)
            if not gives_back:
                del message["reasoning_content"]
            result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "22 degrees"}
            second = await client.chat.completions.create(**ask, messages=[*WEATHERS, message, result])
            assert second.choices[0].message.content == "It is sunny."

    (row,) = (await think(agent)).segments
    response = row.tokens[len(row.tokens) - row.response_length :]
    trained = tiny_tokenizer.decode(response[row.loss_mask == 1])
    assert trained.startswith("<think>I have to look.</think>Let me look.")
    assert "<think>22 is warm.</think>It is sunny." in trained


async def test_thoughts_that_never_end_are_no_text(think):
    async def agent(session):
        async with openai_of(session) as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": "endless"}], "max_tokens": 8}
            cut = (await client.chat.completions.create(**body)).choices[0]
            assert cut.finish_reason == "length"
            assert not cut.message.content
            assert cut.message.reasoning_content
            streamed = [chunk.choices[0] async for chunk in await client.chat.completions.create(**body, stream=True)]
            assert not "".join(choice.delta.content or "" for choice in streamed)

    await think(agent)


@pytest.mark.parametrize("parser", ["qwen3", "deepseek-r1"])
async def test_thoughts_and_text_flow_while_they_are_sampled(run_agent_once, parser):
    """The servers' parser decides what is thoughts, also for a model that begins in the middle of them."""
    flow, words = [], "one two three four five six seven eight nine ten "

    async def agent(session):
        async with openai_of(session) as client:
            ask = {"model": "policy", "messages": [{"role": "user", "content": "count"}], "max_tokens": 400}
            async for chunk in await client.chat.completions.create(**ask, stream=True):
                delta = chunk.choices[0].delta
                if delta.content:
                    flow.append(("text", delta.content))
                if getattr(delta, "reasoning_content", None):
                    flow.append(("thoughts", delta.reasoning_content))

    await run_agent_once(agent, tiny={"reasoning_parser": parser, "step_delay": 0.05}, patience=120)

    kinds = [kind for kind, _ in flow]
    said = {kind: "".join(part for other, part in flow if other == kind) for kind in ("thoughts", "text")}
    assert said == {"thoughts": f"I count: {words}".strip(), "text": f"Counted: {words}".strip()}
    assert kinds == sorted(kinds, reverse=True), "thoughts first"
    assert kinds.count("thoughts") > 2
    assert kinds.count("text") > 2
