"""OpenAI's Agents SDK: `python openai_agents.py JOBS chat|responses`."""

import sys

import jobs
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, Timeout

set_tracing_disabled(True)
MODEL = OpenAIChatCompletionsModel if sys.argv[2] == "chat" else OpenAIResponsesModel


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "22 degrees"


@function_tool
def save(text: str) -> str:
    """Save a file."""
    return "saved"


async def ask(base_url, key, words, tools, idle=60.0):
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=Timeout(60, read=idle)) as client:
        agent = Agent(
            name="weatherman",
            instructions=jobs.SYSTEM,
            tools=tools,
            model=MODEL("policy", client),
            model_settings=ModelSettings(store=False),
        )
        result = Runner.run_streamed(agent, words)
        async for _ in result.stream_events():
            pass
        return result.final_output


async def tool(base_url, key):
    return await ask(base_url, key, jobs.WEATHER, [weather])


async def at_once(base_url, key):
    return await jobs.forty(lambda _: ask(base_url, key, jobs.HELLO, []))


async def long(base_url, key):
    return await ask(base_url, key, jobs.LONG, [save], idle=jobs.IDLE_S)


jobs.run(tool, at_once, long)
