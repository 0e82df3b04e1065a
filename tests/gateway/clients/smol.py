"""smolagents: `python smol.py JOBS`."""

import asyncio

import jobs
from smolagents import OpenAIModel, ToolCallingAgent
from smolagents import tool as as_tool


@as_tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return "22 degrees"


@as_tool
def save(text: str) -> str:
    """Save a file.

    Args:
        text: Its content.
    """
    return "saved"


def model_of(base_url, key, idle):
    more = {"max_retries": 0, "timeout": idle}
    return OpenAIModel("policy", api_base=base_url, api_key=key, client_kwargs=more)


def ask(base_url, key, words, tools, idle=60.0):
    agent = ToolCallingAgent(
        tools=tools, model=model_of(base_url, key, idle), verbosity_level=0, max_steps=4, stream_outputs=True
    )
    return str(agent.run(words))


async def tool(base_url, key):
    return await asyncio.to_thread(ask, base_url, key, jobs.WEATHER, [weather])


async def at_once(base_url, key):
    return await jobs.forty(lambda _: asyncio.to_thread(ask, base_url, key, jobs.HELLO, []))


async def long(base_url, key):
    return await asyncio.to_thread(ask, base_url, key, jobs.LONG, [save], jobs.IDLE_S)


jobs.run(tool, at_once, long)
