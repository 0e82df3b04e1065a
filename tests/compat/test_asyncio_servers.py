"""SGLang servers behind an asyncio HTTP client: the native client's rules over a user's exchange."""

import asyncio
import functools

import aiohttp
import httpx
import pytest
import trio
import uvloop

from trio_rollout import PauseMode, SamplingParams, Stop
from trio_rollout.errors import RequestRejected, ServerLost
from trio_rollout.testing import Fault, Reply, Run, open_fake_sglang
from trio_rollout_compat import Answer, BridgeSettings, aiohttp_client, httpx_client, open_asyncio_servers, open_bridge


async def raw_client(method, url, headers, body):
    """A user's own client: asyncio streams, one connection a request."""
    parts = httpx.URL(url)
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    try:
        lines = [f"{method} {parts.raw_path.decode()} HTTP/1.1", f"host: {parts.host}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items() if name in {"content-type", "content-length"}]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line)
        content = await reader.readexactly(int(fields["content-length"]))
    finally:
        writer.close()
        await writer.wait_closed()
    return Answer(int(head.split()[1]), content, fields)


@pytest.fixture(scope="module")
def libuv():
    """The first loop of the process makes libuv open a pipe for signals, which it never closes."""
    uvloop.new_event_loop().close()


@pytest.fixture(params=["asyncio", "uvloop"])
async def bridge(request, libuv):
    """A loop of each kind on a thread. A client's pool outlives its calls, and that is no misuse."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else None
    settings = BridgeSettings(slow_step=60)  # on a busy machine an import takes seconds
    async with open_bridge("thread", loop_factory=factory, settings=settings) as bridge:
        yield bridge
        assert not bridge.statistics().misuse


async def open_httpx():
    client = httpx.AsyncClient(timeout=None, trust_env=False)
    return httpx_client(client), client.aclose


async def open_aiohttp():
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
    return aiohttp_client(session), session.close


async def open_raw():
    return raw_client, functools.partial(asyncio.sleep, 0)


@pytest.fixture(params=[open_httpx, open_aiohttp, open_raw])
async def client(request, bridge):
    """A client of each kind, opened and closed on the bridge's loop."""
    client, close = await bridge.call(request.param)
    yield client
    await bridge.call(close)


async def test_it_samples_and_is_controlled(bridge, client):
    async with open_fake_sglang() as fake, open_asyncio_servers([fake.url], client, bridge=bridge) as servers:
        turn = await servers.generate([1, 2, 3], SamplingParams(max_new_tokens=4))
        assert (len(turn.output_ids), turn.stop) == (4, Stop.LENGTH)
        await servers.pause(PauseMode.ABORT)
        assert fake.paused
        await servers.resume()
        await servers.flush_cache()
        assert await servers.health() == {fake.url: True}


async def test_a_deadline_aborts_on_the_server(bridge, client):
    async with (
        open_fake_sglang([Run()]) as fake,
        open_asyncio_servers([fake.url], client, bridge=bridge) as servers,
    ):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(servers.generate, [1], SamplingParams(max_new_tokens=4))
                await fake.until(lambda: fake.in_flight == 1)
                scope.cancel()
        assert scope.cancelled_caught
        assert fake.in_flight == 0
        assert servers.statistics().orphans == 0


async def test_what_a_client_does_behind_a_cancelled_call_is_its_own_affair(bridge):
    """A task that looks a name up for later calls goes on, as aiohttp's does."""
    ended = []

    async def look_up():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("looked up")

    async def client(method, url, headers, body):
        if url.endswith("/generate"):
            looking.append(asyncio.create_task(look_up()))
            await asyncio.shield(looking[0])
        return await raw_client(method, url, headers, body)

    looking = []
    async with open_fake_sglang() as fake, open_asyncio_servers([fake.url], client, bridge=bridge) as servers:
        with trio.move_on_after(0.1):
            await servers.generate([1], SamplingParams(max_new_tokens=4))
        assert looking
        assert not ended
    assert not bridge.statistics().misuse


async def test_refusals_and_broken_connections_are_told_apart(bridge, client):
    async with (
        open_fake_sglang([Reply(status=400, body=b'{"error": {"message": "no"}}'), Fault.RESET]) as fake,
        open_asyncio_servers([fake.url], client, bridge=bridge) as servers,
    ):
        with pytest.raises(RequestRejected, match="no"):
            await servers.generate([1], SamplingParams(max_new_tokens=4))
        with pytest.raises(ServerLost):
            await servers.generate([1], SamplingParams(max_new_tokens=4))
