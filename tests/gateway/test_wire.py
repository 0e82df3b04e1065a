"""Odd HTTP requests are answered in the protocol's own shape, and no connection disturbs another."""

import gzip
import json

import h2.config
import h2.connection
import httpx
import pytest
import trio

from trio_rollout import Prompt, SamplingParams
from trio_rollout.gateway import open_gateway
from trio_rollout.testing import FakeServers, Say
from trio_rollout.tiny import DATA

from .test_http_faults import HELLO, ask, connected, raw_request, until
from .virtual import LoneRollout, NoParser

ANTHROPIC = {"anthropic-version": "2023-06-01"}


def over_http2(headers):
    """Return the bytes of a request over HTTP/2 that breaks the rules."""
    config = h2.config.H2Configuration(
        client_side=True, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
    )
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    connection.send_headers(1, headers, end_stream=True)
    return connection.data_to_send()


WEBSOCKET = [
    (b":method", b"CONNECT"),
    (b":protocol", b"websocket"),
    (b":authority", b"x"),
    (b":scheme", b"http"),
    (b":path", b"/\xff"),
]


async def said(session, data):
    """Return the answer to these bytes, until the connection is closed or silent for five seconds."""
    stream, answer = await connected(session), b""
    await stream.send_all(data)
    with trio.move_on_after(5):
        while got := await stream.receive_some(65536):
            answer += got
            if answer.endswith((b"}", b"\r\n\r\n")):
                break
    await stream.aclose()
    return answer


async def test_no_connection_ends_the_gateway(run_agent_once):
    """An error inside the HTTP server fails its own client only."""

    async def agent(session):
        await said(session, over_http2(WEBSOCKET))
        assert (await ask(session)).status_code == 200

    assert (await run_agent_once(agent)).turns == 1


async def test_a_missing_page_is_an_error_in_the_protocols_shape(run_agent_once):
    async def agent(session):
        key = {"authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=session.base_url, headers=key) as client:
            for method, path, status in (
                ("POST", "/v1/embeddings", 404),
                ("GET", "/v1/nothing", 404),
                ("POST", "/v1/models", 405),
            ):
                openai = await client.request(method, path)
                anthropic = await client.request(method, path, headers=ANTHROPIC)
                assert [openai.status_code, anthropic.status_code] == [status, status]
                assert openai.json()["error"]["type"] == "invalid_request_error"
                assert openai.json()["error"]["message"]
                assert anthropic.json()["type"] == "error"
                assert anthropic.json()["error"]["message"]
            chat, messages = await client.get("/chat/completions"), await client.put("/messages")
            assert [chat.status_code, messages.status_code] == [405, 405]
            assert chat.headers["allow"] == messages.headers["allow"] == "POST"
            assert chat.json()["error"]["type"] == "invalid_request_error"
            assert messages.json()["type"] == "error"
            unknown = await client.get("/models", headers={"x-api-key": "sk-other", "authorization": "", **ANTHROPIC})
            assert unknown.status_code == 401
            assert unknown.json()["type"] == "error"
            assert (await client.get("/v1/models/policy")).json()["id"] == "policy"
        assert (await ask(session)).status_code == 200

    await run_agent_once(agent)


@pytest.mark.parametrize("path", ["/chat/completions", "/nothing"])
async def test_a_refusal_waits_until_the_request_is_sent(run_agent_once, path):
    """A connection that is closed while its client still sends can lose the answer."""

    async def agent(session):
        key = session.api_key.encode()
        good = raw_request(session, HELLO)
        bad = raw_request(session, {**HELLO, "padding": "x" * 500_000}, path=path).replace(key, b"sk-other")
        stream, answer = await connected(session), b""
        await stream.send_all(bad[:1000])
        assert (await ask(session)).status_code == 200
        await stream.send_all(bad[1000:])
        await stream.send_all(good)
        with trio.fail_after(20):
            while b'"usage"' not in answer:
                answer += await stream.receive_some(65536)
        assert answer.startswith(b"HTTP/1.1 401" if "chat" in path else b"HTTP/1.1 404")
        assert b"HTTP/1.1 200" in answer
        await stream.aclose()

    assert (await run_agent_once(agent)).turns == 2


async def test_the_key_may_stand_where_clients_put_it(run_agent_once):
    async def agent(session):
        key = session.api_key
        for headers in (
            {"authorization": f"bearer {key}"},
            {"authorization": "", "x-api-key": key},
            {"authorization": f"Bearer {key}", "x-api-key": "of another session"},
            {"authorization": "Bearer of another session", "x-api-key": key},
        ):
            assert (await ask(session, **headers)).status_code == 200, headers
        for headers in ({"authorization": ""}, {"authorization": key[:-1]}, {"authorization": f"Basic {key}"}):
            assert (await ask(session, **headers)).status_code == 401, headers

    await run_agent_once(agent)


async def test_a_compressed_body_is_refused_by_name(run_agent_once):
    async def agent(session):
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{session.base_url}/messages",
                content=gzip.compress(json.dumps(HELLO).encode()),
                headers={"x-api-key": session.api_key, "content-encoding": "gzip"},
            )
        assert answer.status_code == 415
        assert answer.json()["type"] == "error"
        assert "gzip" in answer.json()["error"]["message"]
        assert (await ask(session)).status_code == 200

    assert (await run_agent_once(agent)).turns == 1


async def test_a_connection_on_which_nothing_is_asked_is_closed(autojump_clock):
    """It is closed ten minutes after it was opened or after its last answer, never while an answer is made."""
    servers = FakeServers(plan=lambda number, prompt: Say(seconds=2000))
    async with open_gateway(servers, tokenizer=DATA, parser=NoParser()) as gateway:
        opened = gateway.open_session(LoneRollout(servers), prompt=Prompt(id="p", text="x"), sampling=SamplingParams())
        async with opened as session:
            silent = await connected(session)
            assert await silent.receive_some() == b""
            assert trio.current_time() == 600
            asking, answer = await connected(session), b""
            await asking.send_all(raw_request(session, HELLO))
            while got := await asking.receive_some():
                answer += got
                times = trio.current_time()
            assert answer.startswith(b"HTTP/1.1 200")
            assert (times, trio.current_time()) == (2600, 3200)
            await silent.aclose()
            await asking.aclose()


@pytest.mark.parametrize("kind", ["chunked", "HTTP/1.0", "expect", "pipelined"])
async def test_other_ways_to_send_a_request(run_agent_once, kind):
    async def agent(session):
        whole = raw_request(session, HELLO)
        head, _, body = whole.partition(b"\r\n\r\n")
        count = 1
        if kind == "chunked":
            head = head.rpartition(b"\r\n")[0] + b"\r\ntransfer-encoding: chunked"
            parts = [b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:])]
            whole = head + b"\r\n\r\n" + b"".join(parts) + b"0\r\nx: y\r\n\r\n"
        elif kind == "HTTP/1.0":
            whole = whole.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host: x\r\n", b"")
        elif kind == "expect":
            whole = raw_request(session, HELLO, headers=["expect: 100-continue"])
        else:
            whole, count = whole * 3, 3
        stream, answer = await connected(session), b""
        await stream.send_all(whole)
        with trio.fail_after(20):
            while answer.count(b'"usage"') < count:
                answer += await stream.receive_some(65536)
        await stream.aclose()
        assert answer.count(b"HTTP/1.1 200") == count
        await until(lambda: session.statistics().running == 0)

    await run_agent_once(agent)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, type("OutsideOfException", (BaseException,), {})])
@pytest.mark.parametrize("where", ["parse", "parses_markup"])
async def test_f101_a_parser_that_raises_any_class_fails_that_turn_alone(where, error):
    """The gateway serves every rollout: a user's parser must not end it."""

    class Parser(NoParser):
        broken = True

        def parses_markup(self, tools):
            if self.broken and where == "parses_markup":
                raise error("away")
            return True

        async def parse(self, text, tools):
            if self.broken:
                raise error("away")
            return await super().parse(text, tools)

    servers, parser = FakeServers(), Parser()
    async with open_gateway(servers, tokenizer=DATA, parser=parser) as gateway:
        opened = gateway.open_session(LoneRollout(servers), prompt=Prompt(id="p", text="x"), sampling=SamplingParams())
        async with opened as session:
            assert (await ask(session)).status_code == 503
            parser.broken = False
            assert (await ask(session)).status_code == 200
