"""OpenAI's own client, Responses: whole and streamed, tools, limits."""

import json

import openai
import pytest

from .conftest import WEATHER

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

TOOLS = [{"type": "function", **WEATHER}]


def client_of(session, **options):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **options)


async def test_a_whole_answer(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            answer = await client.responses.create(model="policy", instructions="Be kind.", input="say hello")
            assert answer.output_text == "Hello, world! How are you?"
            assert answer.status == "completed"
            cut = await client.responses.create(model="policy", input="say hello", max_output_tokens=2)
            assert cut.status == "incomplete"
            assert cut.incomplete_details.reason == "max_output_tokens"
            with pytest.raises(openai.BadRequestError, match="no such response"):
                await client.responses.create(model="policy", input="more", previous_response_id="resp_0")
            with pytest.raises(openai.BadRequestError, match="not supported"):
                await client.responses.create(model="policy", input="more", conversation="conv_0")
            with pytest.raises(openai.BadRequestError, match="'input_image' can't be tokenised"):
                image = {"type": "input_image", "image_url": "data:image/png;base64,", "detail": "auto"}
                await client.responses.create(model="policy", input=[{"role": "user", "content": [image]}])

    assert (await run_agent_once(agent)).turns == 2


async def test_a_streamed_tool_loop_becomes_one_row(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            conversation = [{"role": "user", "content": [{"type": "input_text", "text": "the weather, please"}]}]
            async with client.responses.stream(model="policy", input=conversation, tools=TOOLS) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                first = await stream.get_final_response()
            assert "".join(deltas) == "Let me look."
            message, call = first.output
            assert message.content[0].text == "Let me look."
            assert json.loads(call.arguments) == {"city": "Paris"}
            conversation += [
                message.model_dump(exclude_none=True, exclude={"id", "status"}),
                {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
                {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"},
            ]
            async with client.responses.stream(model="policy", input=conversation, tools=TOOLS) as stream:
                final = await stream.get_final_response()
            assert final.output_text == "It is sunny."

    trajectory = await run_agent_once(agent, tiny={"step_delay": 0.005})

    assert trajectory.turns == 2
    assert len(trajectory.segments) == 1


async def test_a_response_continues_the_one_that_it_names(run_agent_once):
    """``previous_response_id``: the conversation so far is the session's, the instructions are each request's own."""

    async def agent(session):
        async with client_of(session) as client:
            ask = {"model": "policy", "tools": TOOLS}
            first = await client.responses.create(**ask, instructions="Be kind.", input="the weather, please")
            call = next(item for item in first.output if item.type == "function_call")
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
            second = await client.responses.create(
                **ask, instructions="Be kind.", input=[result], previous_response_id=first.id
            )
            assert second.output_text == "It is sunny."
            assert second.previous_response_id == first.id
            again = await client.responses.create(**ask, input="say hello", previous_response_id=first.id)
            assert again.usage.input_tokens > second.usage.input_tokens / 2

    trajectory = await run_agent_once(agent)

    assert trajectory.turns == 3
    assert len(trajectory.segments) == 2, "other instructions are another prompt: a branch"
