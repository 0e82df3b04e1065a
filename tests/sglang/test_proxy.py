"""Servers behind an HTTP proxy: every connection is a tunnel through the proxy, and nothing else differs."""

from functools import partial

import attrs
import pytest
import trio

from trio_rollout import SamplingParams
from trio_rollout.errors import ServerError, SettingsError
from trio_rollout.sglang import ServerSettings, open_sglang_servers
from trio_rollout.testing import FakeSGLang, Run, open_fake_sglang

from .helpers import CERTIFICATE, EXPECTED, FIVE, PROMPT, tls_fake


@attrs.define
class Proxy:
    """A proxy that tunnels, or answers ``refusal``. ``asked``: the targets."""

    refusal: bytes = b""
    url: str = ""
    asked: list[str] = attrs.field(factory=list)

    async def serve(self, client: trio.SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += await client.receive_some()
        where = head.split()[1].decode()
        self.asked.append(where)
        if self.refusal:
            await client.send_all(self.refusal)
            return
        host, port = where.rsplit(":", 1)
        async with await trio.open_tcp_stream(host, int(port)) as server, trio.open_nursery() as nursery:
            await client.send_all(b"HTTP/1.1 200 Connection established\r\nvia: test\r\n\r\n")
            nursery.start_soon(self._pump, client, server, nursery)
            nursery.start_soon(self._pump, server, client, nursery)

    async def _pump(self, source: trio.SocketStream, sink: trio.SocketStream, nursery: trio.Nursery) -> None:
        try:
            async for data in source:
                await sink.send_all(data)
        except trio.BrokenResourceError:
            pass
        nursery.cancel_scope.cancel()


@pytest.fixture
async def proxy(nursery):
    running = Proxy()
    (listener,) = await nursery.start(partial(trio.serve_tcp, running.serve, 0, host="127.0.0.1"))
    running.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    return running


def through(proxy: Proxy, **settings) -> ServerSettings:
    return ServerSettings(vocab_size=1000, proxy=proxy.url, **settings)


async def exercise(fake: FakeSGLang, settings: ServerSettings) -> None:
    """Generate, large too, stream, cancel: the abort goes out and is acknowledged."""
    async with open_sglang_servers([fake.url], settings=settings) as servers:
        assert (await servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        assert len((await servers.generate(PROMPT, SamplingParams(max_new_tokens=50_000))).output_ids) == 50_000
        assert (await servers.generate(PROMPT, FIVE, on_progress=lambda: None)).output_ids.tolist() == EXPECTED
        fake.plan = lambda seen: Run() if seen.path == "/generate" else None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(servers.generate, PROMPT, FIVE)
            await fake.until(lambda: fake.in_flight == 1)
            nursery.cancel_scope.cancel()
        assert fake.in_flight == 0


async def test_http_goes_through_it(proxy):
    async with open_fake_sglang() as fake:
        await exercise(fake, through(proxy))
        assert set(proxy.asked) == {fake.url.removeprefix("http://")}
        assert len(proxy.asked) == fake.accepted


async def test_https_goes_through_it_and_the_certificate_is_the_servers(proxy):
    async with tls_fake() as fake:
        await exercise(fake, through(proxy, ca_file=str(CERTIFICATE)))
        assert set(proxy.asked) == {fake.url.removeprefix("https://")}


@pytest.mark.parametrize("refusal", [b"HTTP/1.1 403 Forbidden\r\n\r\n", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 4"])
async def test_a_proxy_that_will_not_is_named_with_what_it_said(proxy, refusal):
    proxy.refusal = refusal
    with pytest.raises(ServerError, match=r"CONNECT 127\.0\.0\.1:1"):
        async with open_sglang_servers(["http://127.0.0.1:1"], settings=through(proxy)):
            pass


@pytest.mark.parametrize("url", ["https://p:1", "http://p:1/x", "unix:/p", "p:1", "http://me:x@p:1"])
async def test_other_proxies_are_refused_by_name(url):
    with pytest.raises(SettingsError, match=r"proxy|URL"):
        async with open_sglang_servers(["http://127.0.0.1:1"], settings=ServerSettings(proxy=url)):
            pass
