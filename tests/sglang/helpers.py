"""Shared parts of the client's tests: a client of a few fake servers, in memory or over sockets."""

import random
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import trio

from trio_rollout import Ports, SamplingParams
from trio_rollout._util.threads import RunSync, run_in_thread
from trio_rollout.sglang import ServerSettings, SGLangServers, open_sglang_servers
from trio_rollout.testing import FakeSGLang, Link, Plan, SimHost, SimNet, open_fake_sglang, open_sim_net

FIVE = SamplingParams(max_new_tokens=5)
PROMPT = [1, 2, 3]
EXPECTED = [6, 7, 8, 9, 10]
"""The fake's answer to PROMPT under FIVE."""
PROMPT_LINK = Link(latency=(0.0, 0.0), split=0.0)
"""A network that takes no time, so that tests can say when things happen."""
SETTINGS = ServerSettings(vocab_size=1000)


@attrs.frozen
class World:
    """Fake servers in memory and a client of them."""

    fakes: list[FakeSGLang]
    servers: SGLangServers
    net: SimNet

    @property
    def fake(self) -> FakeSGLang:
        return self.fakes[0]

    def host(self, fake: FakeSGLang | None = None) -> SimHost:
        """The host of a fake server (by default of the first)."""
        return self.net.host((fake or self.fake).url)


@asynccontextmanager
async def memory_world(
    *plans: Plan, settings: ServerSettings = SETTINGS, ports: Ports | None = None, run_sync: RunSync = run_in_thread
) -> AsyncGenerator[World]:
    """One fake server for each plan (one without a plan if there is none), and a client; all in virtual time."""
    fakes = [FakeSGLang(plan, url=f"http://fake{number}:1") for number, plan in enumerate(plans or ((),))]
    async with (
        open_sim_net({fake.url: fake.serve for fake in fakes}, rng=random.Random(0), link=PROMPT_LINK) as net,
        open_sglang_servers(
            [fake.url for fake in fakes], settings=settings, connect=net.connect, ports=ports, run_sync=run_sync
        ) as servers,
    ):
        yield World(fakes, servers, net)


@asynccontextmanager
async def socket_world(*plans: Plan, settings: ServerSettings = SETTINGS, **fake: float) -> AsyncGenerator[World]:
    """The same over real sockets on local ports."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(open_fake_sglang(plan, **fake)) for plan in plans or ((),)]
        servers = await stack.enter_async_context(open_sglang_servers([fake.url for fake in fakes], settings=settings))
        yield World(fakes, servers, None)


@attrs.frozen(kw_only=True)
class Asked:
    """A call, as its answer's reader sees it."""

    attempted: str
    rid: str
    request: object
    version_of: object


def sent(fake: FakeSGLang, path: str) -> list[object]:
    """The bodies that came to this path."""
    return [seen.body for seen in fake.seen if seen.path == path]


CERTIFICATE = Path(__file__).with_name("localhost.pem")  # self-signed, for localhost and nothing else


@asynccontextmanager
async def tls_fake(*plan):
    """A fake server behind TLS; yields it with its URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    fake = FakeSGLang(plan)
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_ssl_over_tcp, fake.serve, 0, context, host="127.0.0.1", https_compatible=True)
        (listener,) = await nursery.start(serve)
        fake.url = f"https://localhost:{listener.transport_listener.socket.getsockname()[1]}"
        try:
            yield fake
        finally:
            nursery.cancel_scope.cancel()
