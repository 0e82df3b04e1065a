"""A gateway without a port, over fake servers: sessions in virtual time."""

from contextlib import asynccontextmanager

import attrs

from trio_rollout import IterableSource, Ports, Prompt, SamplingParams, open_rollout_engine
from trio_rollout.gateway import GatewaySettings, Parsed
from trio_rollout.gateway._gateway import AgentGateway
from trio_rollout.gateway._values import ChatRequest, ContextLimits
from trio_rollout.testing import FakeServers, run_inline
from trio_rollout.tiny import DATA
from trio_rollout.tokenizer import load_tokenizer


class NoParser:
    """Answers are their own text."""

    finds_thoughts = False

    def parses_markup(self, tools):
        return False

    async def parse(self, text, tools):
        return Parsed(text=text)


def counted():
    """Return a source of ids that are known in advance."""
    numbers = iter(range(1_000_000_000))
    return lambda: f"{next(numbers):032x}"


def virtual_gateway(*, limits=None, run_sync=run_inline, **settings):
    return AgentGateway(
        url="http://gateway",
        tokenizer=load_tokenizer(DATA),
        parser=NoParser(),
        settings=GatewaySettings(**settings),
        limits=limits or ContextLimits(length=settings.get("context_length")),
        run_sync=run_sync,
        new_secret=counted(),
    )


def asks(text, *, digest=None, key="", history=(), stream=False):
    """Return a request with one more message of the user."""
    messages = (*history, {"role": "user", "content": text})
    return ChatRequest(messages=messages, digest=digest or repr(messages), key=key, stream=stream, max_tokens=8)


async def ask(session, request):
    """Wait for the answer and deliver it, as a handler does for a client that stays."""
    with session.turn_for(request) as turn:
        await turn.wait_over()
        if turn.error is not None:
            raise turn.error
        turn.delivered = True
        return turn


@attrs.define
class VirtualEngine:
    engine: object
    servers: FakeServers
    gateway: AgentGateway


@asynccontextmanager
async def virtual_engine(generate, *, servers=None, reward=None, count=1, settings=None, **changes):
    """An engine over fake servers whose generate function may open sessions."""
    servers = servers or FakeServers()
    gateway = virtual_gateway(**changes)

    async def one(trajectory):
        return 1.0

    async with open_rollout_engine(
        IterableSource([Prompt(id=str(number), text="task") for number in range(count)]),
        generate,
        servers=servers,
        reward=reward or one,
        gateway=gateway,
        settings=settings,
        ports=Ports(),
    ) as engine:
        yield VirtualEngine(engine, servers, gateway)
    assert servers.running == 0
    assert gateway.statistics().sessions == 0


class LoneRollout:
    """A rollout that only samples, for sessions without an engine."""

    index = 0

    def __init__(self, servers=None):
        self.servers = servers or FakeServers()

    async def generate(self, input_ids, sampling=None, *, extra=None, on_tokens=None):
        return await self.servers.generate(input_ids, sampling, on_tokens=on_tokens)


@asynccontextmanager
async def lone_session(servers=None, **settings):
    """A session over fake servers; yields it, its servers and its gateway."""
    gateway, rollout = virtual_gateway(**settings), LoneRollout(servers)
    async with gateway.open_session(rollout, prompt=Prompt(id="p", text="task"), sampling=SamplingParams()) as session:
        yield session, rollout.servers, gateway
