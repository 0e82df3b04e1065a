"""OpenAI's own client, Chat Completions: whole and streamed, tools, limits, errors."""

import json

import openai
import pytest

from trio_rollout import SamplingParams, Status

from .conftest import WEATHER

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

TOOLS = [{"type": "function", "function": WEATHER}]


def client_of(session, **options):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **options)


async def test_a_whole_answer(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "say hello"}]
            )
        assert answer.choices[0].message.content == "Hello, world! How are you?"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens > 4

    trajectory = await run_agent_once(agent)

    assert trajectory.turns == 1
    assert trajectory.status is Status.COMPLETED
    assert trajectory.text == "Hello, world! How are you?"


async def test_a_tool_loop_becomes_one_row(run_agent_once, tiny_tokenizer):
    """The second turn's prompt is the first turn's ids and what came after: one row, masks where the agent wrote."""

    async def agent(session):
        async with client_of(session) as client:
            messages = [{"role": "user", "content": "what is the weather?"}]
            first = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert message.content == "Let me look."
            assert message.tool_calls[0].function.name == "weather"
            assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
            messages += [
                message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "22 degrees"},
            ]
            second = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            assert second.choices[0].message.content == "It is sunny."

    trajectory = await run_agent_once(agent)

    (row,) = trajectory.segments
    response = row.tokens[len(row.tokens) - row.response_length :]
    trained = tiny_tokenizer.decode(response[row.loss_mask == 1])
    assert trained.startswith('Let me look.\n<tool_call>\n{"name":"weather"')
    assert trained.endswith("It is sunny.<|im_end|>")
    assert "22 degrees" in tiny_tokenizer.decode(response[row.loss_mask == 0])
    assert "22 degrees" not in trained
    assert trajectory.turns == 2


async def test_a_stream_flows_while_it_is_sampled(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            stream = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "say hello"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        deltas = [
            chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content
        ]
        assert "".join(deltas) == "Hello, world! How are you?"
        assert len(deltas) > 3
        assert chunks[-1].usage.completion_tokens > 4
        assert chunks[-2].choices[0].finish_reason == "stop"

    trajectory = await run_agent_once(agent, tiny={"step_delay": 0.01})

    assert trajectory.turns == 1


async def test_the_streaming_helper_puts_a_tool_call_together(run_agent_once):
    async def agent(session):
        async with (
            client_of(session) as client,
            client.chat.completions.stream(
                model="policy", messages=[{"role": "user", "content": "the weather"}], tools=TOOLS
            ) as stream,
        ):
            events = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "content.delta" in events
        assert final.choices[0].message.content == "Let me look."
        assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}

    await run_agent_once(agent)


async def test_stop_sequences_and_limits(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            ask = {"model": "policy", "messages": [{"role": "user", "content": "say hello"}]}
            stopped = await client.chat.completions.create(**ask, stop=["world"])
            assert stopped.choices[0].message.content == "Hello, "
            assert stopped.choices[0].finish_reason == "stop"
            streamed = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**ask, stop=["world"], stream=True)
            ]
            assert "".join(streamed) == "Hello, "
            cut = await client.chat.completions.create(**ask, max_tokens=3)
            assert cut.choices[0].finish_reason == "length"
            assert cut.usage.completion_tokens == 3

    trajectory = await run_agent_once(agent)

    assert trajectory.status is Status.TRUNCATED
    assert len(trajectory.segments) == 3


async def test_a_used_up_context_is_answered_without_a_request(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            hello = [{"role": "user", "content": "say hello"}]
            fits = await client.chat.completions.create(model="policy", messages=hello)
            assert fits.choices[0].finish_reason == "length"
            assert fits.usage.prompt_tokens + fits.usage.completion_tokens == 30
            long = [{"role": "user", "content": "x" * 100}]
            empty = await client.chat.completions.create(model="policy", messages=long)
            assert empty.choices[0].finish_reason == "length"
            assert not empty.choices[0].message.content
            assert empty.usage.completion_tokens == 0

    trajectory = await run_agent_once(agent, gateway={"context_length": 30})

    assert trajectory.turns == 1
    assert trajectory.status is Status.TRUNCATED


async def test_the_rollouts_temperature_wins(run_agent_once, open_stage):
    async def agent(session):
        async with client_of(session) as client:
            for temperature in (0.0, 2.0):
                await client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "free"}],
                    temperature=temperature,
                    max_tokens=8,
                )

    trajectory = await run_agent_once(agent, sampling=SamplingParams(temperature=0.0))

    first, second = trajectory.segments
    assert first.tokens.tolist() == second.tokens.tolist()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n: got 2"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}, "at least 1"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}, "at least 1"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": ""}, "stop"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": ["a", ""], "stream": True}, "stop"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 1e300}, "allowed: 0 to 2"),
        ({"messages": [{"role": "user", "content": "x"}], "top_p": 7}, "top_p"),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "logprobs"),
    ],
)
async def test_bad_requests_are_refused_in_openais_shape(run_agent_once, body, words):
    async def agent(session):
        async with client_of(session, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match=words):
                await client.post("/chat/completions", body={"model": "policy", **body}, cast_to=object)
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "say hello"}])

    await run_agent_once(agent, gateway={"agents_choose_temperature": True})


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, '{"a": "\\ud800"}', '{"a": NaN}', '["x"]', "", '{"a": 1' + "0" * 30 + "}"]
)
async def test_whatever_a_call_was_given_it_may_be_sent_back(run_agent_once, arguments):
    """Agents send what a model has sampled, and that may be anything."""

    async def agent(session):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "the weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "22 degrees"},
        ]
        async with client_of(session, max_retries=0) as client:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "It is sunny."

    await run_agent_once(agent, sampling=SamplingParams(max_new_tokens=64))


async def test_models_and_wrong_keys(run_agent_once):
    async def agent(session):
        async with client_of(session) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "say hello"}])
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="sk-other").models.list()
            with pytest.raises(openai.NotFoundError):
                await client.with_options(base_url=session.base_url + "0").models.list()

    await run_agent_once(agent)
