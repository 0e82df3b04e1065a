"""Pydantic AI: `python pydantic_agents.py JOBS chat|responses|messages`."""

import sys

import anthropic
import jobs
import openai
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

API = sys.argv[2]


def weather(city: str) -> str:
    """The weather of a city."""
    return "22 degrees"


def save(text: str) -> str:
    """Save a file."""
    return "saved"


def model_of(base_url, key, idle):
    vendor = anthropic if API == "messages" else openai
    limits = {"base_url": base_url, "api_key": key, "max_retries": 0, "timeout": vendor.Timeout(60, read=idle)}
    if API == "messages":
        return AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=anthropic.AsyncAnthropic(**limits)))
    kind = OpenAIChatModel if API == "chat" else OpenAIResponsesModel
    return kind("policy", provider=OpenAIProvider(openai_client=openai.AsyncOpenAI(**limits)))


async def read_stream(_context, events):
    """Have the answers streamed."""
    async for _ in events:
        pass


async def ask(base_url, key, words, tools, idle=60.0):
    agent = Agent(model_of(base_url, key, idle), instructions=jobs.SYSTEM, tools=tools, retries=0)
    return (await agent.run(words, event_stream_handler=read_stream)).output


async def tool(base_url, key):
    return await ask(base_url, key, jobs.WEATHER, [weather])


async def at_once(base_url, key):
    return await jobs.forty(lambda _: ask(base_url, key, jobs.HELLO, []))


async def long(base_url, key):
    return await ask(base_url, key, jobs.LONG, [save], idle=jobs.IDLE_S)


jobs.run(tool, at_once, long)
