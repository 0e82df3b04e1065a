"""LangChain: `python langchain_agents.py JOBS chat|responses|messages`."""

import sys

import jobs
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI

API = sys.argv[2]


@as_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "22 degrees"


@as_tool
def save(text: str) -> str:
    """Save a file."""
    return "saved"


def model_of(base_url, key, idle):
    limits = {"base_url": base_url, "api_key": key, "max_retries": 0, "timeout": idle, "streaming": True}
    if API == "messages":
        return ChatAnthropic(model="policy", max_tokens=4000, **limits)
    return ChatOpenAI(model="policy", use_responses_api=API == "responses", **limits)


async def ask(base_url, key, words, tools, idle=60.0):
    agent = create_agent(model_of(base_url, key, idle), tools=tools, system_prompt=jobs.SYSTEM)
    done = await agent.ainvoke({"messages": [{"role": "user", "content": words}]})
    return done["messages"][-1].text


async def tool(base_url, key):
    return await ask(base_url, key, jobs.WEATHER, [weather])


async def at_once(base_url, key):
    return await jobs.forty(lambda _: ask(base_url, key, jobs.HELLO, []))


async def long(base_url, key):
    return await ask(base_url, key, jobs.LONG, [save], idle=jobs.IDLE_S)


jobs.run(tool, at_once, long)
