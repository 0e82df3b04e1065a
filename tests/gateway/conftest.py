"""Fixtures of the gateway's tests: a gateway over a tiny server on a real socket, and one rollout that is an agent."""

import warnings
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import pytest
import trio

from trio_rollout import (
    Deadlines,
    EngineSettings,
    IterableSource,
    Prompt,
    Retry,
    SamplingParams,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.errors import EndOfData
from trio_rollout.gateway import GatewaySettings, open_gateway
from trio_rollout.tiny import DATA, TinySettings, open_tiny_server
from trio_rollout.tokenizer import load_tokenizer

SCRIPT = """
[[rules]]
last_contains = "<tool_response>"
answer = "It is sunny."

[[rules]]
contains = ["weather"]
lacks = "no tools"
answer = "Let me look."
calls = [{ name = "weather", arguments = { city = "Paris" } }]

[[rules]]
last_contains = "say hello"
answer = "Hello, world! How are you?"
"""

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@attrs.define
class Stage:
    """The parts of a running engine that a test may look at."""

    gateway: object
    engine: object
    servers: object
    tiny: object


async def one(trajectory):
    return 1.0


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture
def open_stage(script):
    """``async with open_stage(agent) as stage``: an engine whose rollouts are ``agent(session)``, over one tiny server."""

    @asynccontextmanager
    async def opened(
        agent,
        *,
        generate=None,
        count=1,
        samples=1,
        tiny=None,
        gateway=None,
        sampling=None,
        tokenizer=DATA,
        parser=None,
        **settings,
    ):
        sampling = sampling or SamplingParams(max_new_tokens=256)

        async def of_agent(prompt, rollout):
            async with rollout.session(sampling=sampling) as session:
                await agent(session)
            return session.trajectory()

        prompts = [Prompt(id=str(number), text="task") for number in range(count)]
        deadlines = Deadlines(**{"abort": 2.0, "drain": 8.0, **settings.pop("deadlines", {})})
        engine_settings = {"samples_per_prompt": samples, "max_running": 64, "retry": Retry(max_attempts=1)}
        async with (
            open_tiny_server(TinySettings(script=script, **(tiny or {}))) as server,
            open_sglang_servers([server.url]) as servers,
            open_gateway(
                servers, tokenizer=tokenizer, settings=GatewaySettings(**(gateway or {})), parser=parser
            ) as opened_gateway,
            open_rollout_engine(
                IterableSource(prompts),
                generate or of_agent,
                servers=servers,
                reward=one,
                gateway=opened_gateway,
                settings=EngineSettings(**{**engine_settings, **settings}, deadlines=deadlines),
            ) as engine,
        ):
            yield Stage(opened_gateway, engine, servers, server)

    return opened


@pytest.fixture
def run_agent_once(open_stage):
    """Run one rollout that is this agent, and return its trajectory; raise the agent's exception."""

    async def run(agent, *, stages=None, patience=60, **options):
        raised = []

        async def watched(session):
            try:
                await agent(session)
            except Exception as error:
                raised.append(error)
                raise

        with trio.fail_after(patience):
            async with open_stage(watched, **options) as stage:
                if stages is not None:
                    stages.append(stage)
                batches = []
                with suppress(EndOfData):  # also if the agent raised, and its group was quarantined
                    while True:
                        batches.append(await stage.engine.next_batch(1))
        if raised:
            raise raised[0]
        return batches[0].groups[0].trajectories[0]

    return run


@pytest.fixture
def tiny_tokenizer():
    """The tokenizer of the tiny server, as the gateway uses it."""
    return load_tokenizer(DATA)


@pytest.fixture
def clients_leave_generators(_no_leaks):
    """Ignore generators that the vendors' clients leave to the garbage collector: they stop reading at the last event."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Async generator '(openai|anthropic|httpx|httpcore)", ResourceWarning)
        yield
