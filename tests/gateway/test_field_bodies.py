"""Failures from the field: bodies and heads that no client of good will sends, and those of one that is overdone."""

import json

import httpx
import pytest
import trio

from trio_rollout import Prompt, SamplingParams, ServerSettings, open_sglang_servers
from trio_rollout.gateway import GatewaySettings, open_gateway
from trio_rollout.testing import FakeServers, Reply, Run, Say, open_fake_sglang, run_inline
from trio_rollout.tiny import DATA

from .talk import APIS
from .test_field_turns import PATHS, body_of
from .test_http_faults import FREE, HELLO, ask, connected, raw_request, until
from .test_wire import said
from .virtual import LoneRollout, NoParser, virtual_gateway

HUGE = ["1" + "0" * 400, "9" * 5000, "1e400", "-" + "9" * 5000, str(2**63), str(2**64)]
FIELDS = {
    "chat": ["max_tokens", "max_completion_tokens", "n", "top_logprobs", "temperature", "top_p", "seed"],
    "responses": ["max_output_tokens", "top_logprobs", "temperature", "top_p", "max_tool_calls"],
    "messages": ["max_tokens", "temperature", "top_p", "top_k"],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_f153_no_number_is_a_failure_of_the_model(autojump_clock, api, stream):
    """A number beyond all bounds is refused, or taken for the bound; also where the length of the context is not known."""
    servers = FakeServers(plan=lambda number, prompt: Say(tokens=3))
    settings = GatewaySettings(agents_choose_temperature=True)
    async with open_gateway(servers, tokenizer=DATA, parser=NoParser(), settings=settings) as gateway:
        opened = gateway.open_session(LoneRollout(servers), prompt=Prompt(id="p", text="x"), sampling=SamplingParams())
        async with opened as session, httpx.AsyncClient(trust_env=False) as client:
            for field in FIELDS[api]:
                for number in HUGE:
                    body = json.dumps({**body_of(api, stream=stream), field: "HERE"}).replace('"HERE"', number)
                    answer = await client.post(
                        session.base_url + PATHS[api], content=body, headers={"x-api-key": session.api_key}
                    )
                    assert answer.status_code in {200, 400}, (field, number, answer.text)


async def test_f153_two_framings_of_one_body_are_refused(run_agent_once):
    """A proxy and a server that believe different ones see different requests."""

    async def agent(session):
        plain = raw_request(session, HELLO)
        body = plain.partition(b"\r\n\r\n")[2]
        both = raw_request(session, HELLO, headers=["transfer-encoding: chunked"]).partition(b"\r\n\r\n")[0]
        answer = await said(session, both + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"transfer-encoding" in answer
        assert (await said(session, plain)).startswith(b"HTTP/1.1 200")

    assert (await run_agent_once(agent)).turns == 1


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_f153_a_bare_line_feed_in_a_head_is_refused(run_agent_once, end):
    async def agent(session):
        head, _, body = raw_request(session, HELLO).partition(b"\r\n\r\n")
        for at in (1, 2, head.count(b"\r\n")):
            lines = head.split(b"\r\n")
            mixed = b"\r\n".join(lines[:at]) + end + b"\r\n".join(lines[at:])
            for parts in ([mixed + b"\r\n\r\n" + body], [mixed[:30], mixed[30:] + b"\r\n\r\n" + body]):
                stream, answer = await connected(session), b""
                async with stream:
                    for part in parts:
                        await stream.send_all(part)
                        await trio.testing.wait_all_tasks_blocked(0.01)
                    with trio.fail_after(20):
                        while b"\r\n\r\n" not in answer:
                            answer += await stream.receive_some()
                assert answer.startswith(b"HTTP/1.1 400" if end == b"\n" else b"HTTP/1.1 200"), (at, answer)
        assert (await ask(session)).status_code == 200

    await run_agent_once(agent)


async def test_f153_a_head_that_does_not_end_is_given_up(autojump_clock):
    """Within the time for a body, however it drips; a connection on which nothing was begun may rest for longer."""
    settings = GatewaySettings(body_seconds=10)
    async with open_gateway(FakeServers(), tokenizer=DATA, parser=NoParser(), settings=settings) as gateway:
        opened = gateway.open_session(LoneRollout(), prompt=Prompt(id="p", text="x"), sampling=SamplingParams())
        async with opened as session:
            whole = raw_request(session, HELLO)
            async with await connected(session) as stream:
                await trio.sleep(100)
                await stream.send_all(whole)
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
                begun = trio.current_time()
                with pytest.raises(trio.BrokenResourceError):
                    for byte in whole * 10:
                        await stream.send_all(bytes([byte]))
                        await trio.sleep(1)
                assert 9 <= trio.current_time() - begun <= 13


async def test_f153_connections_are_bounded_and_idle_ones_make_room(run_agent_once):
    """The oldest that rests is closed for a newcomer; if all are busy the newcomer is told to come again."""

    async def agent(session):
        idle = [await connected(session) for _ in range(3)]
        await trio.sleep(0.1)
        assert (await ask(session)).status_code == 200
        with trio.fail_after(10):
            assert await idle[0].receive_some() == b""
        for stream in idle:
            await stream.aclose()
        busy = []
        for place in range(3):
            busy.append(await connected(session))
            await busy[-1].send_all(raw_request(session, FREE))
            await until(lambda place=place: session.statistics().running == place + 1)
        refused = await said(session, raw_request(session, HELLO))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in refused
        for stream in busy:
            await stream.aclose()
        await until(lambda: session.statistics().running == 0)
        assert (await ask(session)).status_code == 200

    await run_agent_once(agent, gateway={"max_connections": 3}, tiny={"step_delay": 0.02})


@pytest.mark.parametrize("api", APIS)
async def test_f153_a_path_with_a_slash_at_its_end_leads_nowhere_else(run_agent_once, api):
    async def agent(session):
        request = raw_request(session, HELLO, path=f"{PATHS[api]}/").replace(b"host: x", b"host: evil.example")
        for data in (request, request.replace(session.api_key.encode(), b"sk-other")):
            answer = await said(session, data)
            assert answer.startswith(b"HTTP/1.1 404")
            assert b"evil" not in answer
        assert (await ask(session)).status_code == 200

    await run_agent_once(agent)


async def test_f153_a_large_request_is_read_and_placed_beside_the_loop(autojump_clock):
    """200,000 tiny messages held up every session for seconds."""
    beside = []

    async def run_sync(fn, /, *args):
        beside.append(fn.__name__)
        return await run_inline(fn, *args)

    servers = FakeServers()
    gateway = virtual_gateway(run_sync=run_sync)
    messages = [{"role": "user", "content": ""}] * 20_000
    async with gateway.open_session(
        LoneRollout(servers), prompt=Prompt(id="p", text="x"), sampling=SamplingParams()
    ) as s:
        body = json.dumps({"messages": messages, "max_tokens": 3}).encode()
        sent = []
        headers = [(b"x-api-key", s.api_key.encode())]
        path = "/" + s.base_url.split("/", 3)[3] + "/chat/completions"
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": headers,
            "query_string": b"",
            "root_path": "",
        }
        gone = trio.Event()

        async def receive():
            if sent:
                await gone.wait()
            sent.append("read")
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        await gateway.app(scope, receive, send)
    assert sent[1]["status"] == 200
    assert beside == ["request", "place"]


async def test_f153_the_parsers_are_asked_over_the_servers_own_connections(monkeypatch):
    """With the servers' key, and past any proxy that the environment names."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    def plan(seen):
        found = {"/separate_reasoning": {"text": "b", "reasoning_text": "a"}, "/v1/models": {}}.get(seen.path)
        return Run() if found is None else Reply(body=found)

    async with (
        open_fake_sglang(plan) as fake,
        open_sglang_servers([fake.url], settings=ServerSettings(vocab_size=9, api_key="s3cret")) as servers,
        open_gateway(servers, tokenizer=DATA, settings=GatewaySettings(reasoning_parser="qwen3")) as gateway,
    ):
        parsed = await gateway._parser.parse("<think>a</think>b", ())
        assert (parsed.reasoning, parsed.text) == ("a", "b")
        asked = [seen for seen in fake.seen if seen.path in {"/separate_reasoning", "/v1/models", "/server_info"}]
    assert {seen.path for seen in asked} == {"/separate_reasoning", "/v1/models", "/server_info"}
    assert {seen.headers.get("authorization") for seen in asked} == {"Bearer s3cret"}
