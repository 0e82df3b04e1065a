"""Anthropic's own client: whole and streamed, tools, limits, errors, counting."""

import anthropic
import pytest

from .conftest import WEATHER

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

TOOLS = [{"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}]
HELLO = {"model": "policy", "max_tokens": 100, "messages": [{"role": "user", "content": "say hello"}]}


def client_of(session, **options):
    return anthropic.AsyncAnthropic(base_url=session.base_url, api_key=session.api_key, **options)


async def test_a_whole_answer(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            answer = await client.messages.create(**HELLO, system="Be kind.")
            assert [block.text for block in answer.content] == ["Hello, world! How are you?"]
            assert answer.stop_reason == "end_turn"
            counted = await client.messages.count_tokens(model="policy", messages=HELLO["messages"], system="Be kind.")
            assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens

    assert (await run_agent_once(agent)).turns == 1


async def test_a_streamed_tool_loop_becomes_one_row(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            messages = [{"role": "user", "content": [{"type": "text", "text": "the weather, please"}]}]
            ask = {"model": "policy", "max_tokens": 200, "tools": TOOLS}
            async with client.messages.stream(**ask, messages=messages) as stream:
                texts = [text async for text in stream.text_stream]
                first = await stream.get_final_message()
            assert "".join(texts) == "Let me look."
            assert len(texts) > 1
            assert first.stop_reason == "tool_use"
            text, call = first.content
            assert text.text == "Let me look."
            assert (call.name, call.input) == ("weather", {"city": "Paris"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "22"}]}
            messages += [
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
                {"role": "user", "content": [result]},
            ]
            async with client.messages.stream(**ask, messages=messages) as stream:
                assert await stream.get_final_text() == "It is sunny."

    trajectory = await run_agent_once(agent, tiny={"step_delay": 0.005})

    assert trajectory.turns == 2
    assert len(trajectory.segments) == 1


async def test_stop_sequences_and_limits(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            stopped = await client.messages.create(**HELLO, stop_sequences=["world"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "world")
            assert stopped.content[0].text == "Hello, "
            cut = await client.messages.create(**{**HELLO, "max_tokens": 2})
            assert cut.stop_reason == "max_tokens"
            assert cut.usage.output_tokens == 2

    await run_agent_once(agent)


async def test_errors_have_anthropics_shape(run_agent_once):
    async def agent(session):
        async with client_of(session, max_retries=0) as client:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**{**HELLO, "messages": []})
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="sk-other").messages.create(**HELLO)
            await client.messages.create(**HELLO)
            with pytest.raises(anthropic.RateLimitError, match="the limit is 1"):
                await client.messages.create(**{**HELLO, "max_tokens": 3})
            assert [model.id async for model in client.models.list()] == ["policy"]

    await run_agent_once(agent, gateway={"max_turns": 1})
