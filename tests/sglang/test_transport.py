"""``servers.httpx_transport()``: clients of other libraries over the same connections, on Trio."""

import warnings

import anthropic
import httpx
import httpx2
import openai
import pytest
import trio

from trio_rollout import PauseMode
from trio_rollout.sglang import ServerSettings, open_sglang_servers
from trio_rollout.testing import Fault, Reply

from .helpers import FIVE, PROMPT, memory_world, socket_world

COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "six"}}],
}
MESSAGE = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "policy",
    "content": [{"type": "text", "text": "six"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
CHUNK = {**COMPLETION, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "six"}}]}
ASKED = [{"role": "user", "content": "five and one?"}]


def speaks_openai_and_anthropic(seen):
    if seen.path == "/v1/chat/completions":
        if seen.body.get("stream"):
            events = b"data: %b\n\ndata: [DONE]\n\n" % httpx.Response(200, json=CHUNK).content
            return Reply(body=events, headers={"content-type": "text/event-stream"})
        return Reply(body=COMPLETION)
    return Reply(body=MESSAGE) if seen.path == "/v1/messages" else None


@pytest.fixture
def clients_leave_generators(_no_leaks):
    """OpenAI's client stops reading at the last event, and leaves generators to the garbage collector."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Async generator '(openai|httpx2)", ResourceWarning)
        yield


@pytest.fixture
def quick_client(clients_leave_generators):
    """An httpx2 client over a world's servers."""
    return lambda run: httpx2.AsyncClient(transport=run.servers.httpx_transport(), trust_env=False)


async def test_openais_client_runs_on_trio_through_it(quick_client):
    """Whole and streamed, over a connection that generation uses afterwards."""
    async with socket_world(speaks_openai_and_anthropic) as run, quick_client(run) as http:
        client = openai.AsyncOpenAI(base_url="http://servers/v1", api_key="x", http_client=http)
        answer = await client.chat.completions.create(model="policy", messages=ASKED)
        assert answer.choices[0].message.content == "six"
        stream = await client.chat.completions.create(model="policy", messages=ASKED, stream=True)
        parts = [part.choices[0].delta.content async for part in stream]
        await stream.close()
        assert parts == ["six"]
        before = run.fake.accepted
        await run.servers.generate(PROMPT, FIVE)
        assert run.fake.accepted == before
        (first, *_) = [seen for seen in run.fake.seen if seen.path == "/v1/chat/completions"]
        assert first.headers["host"] == run.fake.url.removeprefix("http://")


async def test_anthropics_client_runs_on_trio_through_it(quick_client):
    async with socket_world(speaks_openai_and_anthropic) as run, quick_client(run) as http:
        client = anthropic.AsyncAnthropic(base_url="http://servers", api_key="x", http_client=http)
        answer = await client.messages.create(model="policy", max_tokens=5, messages=ASKED)
        assert answer.content[0].text == "six"


async def test_errors_are_those_that_the_clients_know(quick_client):
    """A refusal with its status, a dead connection as a connection error (the new one, too): their retries see them."""
    refusal = Reply(status=400, body={"error": {"message": "too long"}})
    plan = {"/v1/chat/completions": [refusal, Fault.RESET, Fault.RESET]}
    async with socket_world(plan) as run, quick_client(run) as http:
        client = openai.AsyncOpenAI(base_url="http://servers/v1", api_key="x", http_client=http, max_retries=0)
        with pytest.raises(openai.BadRequestError, match="too long"):
            await client.chat.completions.create(model="policy", messages=ASKED)
        with pytest.raises(openai.APIConnectionError):
            await client.chat.completions.create(model="policy", messages=ASKED)


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_both_libraries_get_their_own_answers_and_errors(autojump_clock, library):
    async with memory_world() as run, library.AsyncClient(transport=run.servers.httpx_transport()) as client:
        answer = await client.get("http://servers/model_info")
        assert type(answer) is library.Response
        assert answer.json()["weight_version"] == "default"
        assert (await client.get(f"{run.fake.url}/model_info")).status_code == 200
        with pytest.raises(library.UnsupportedProtocol, match="not one of these servers"):
            await client.get("http://elsewhere/v1")


async def test_the_servers_share_the_work_and_a_prefix_stays_in_front(autojump_clock):
    async with memory_world((), ()) as run, httpx.AsyncClient(transport=run.servers.httpx_transport()) as client:
        for _ in range(4):
            await client.get("http://servers/model_info")
        assert [sum(seen.path == "/model_info" for seen in fake.seen) for fake in run.fakes] == [
            3,
            3,
        ]  # one was asked at the start


async def test_nothing_is_sent_while_weights_change(autojump_clock):
    """A request waits for the resume, at most as long as the client's timeout."""
    async with memory_world() as run, httpx.AsyncClient(transport=run.servers.httpx_transport()) as client:
        await run.servers.pause(PauseMode.RETRACT)
        with pytest.raises(httpx.PoolTimeout, match="within 3"):
            await client.get("http://servers/model_info", timeout=3.0)
        answers = []

        async def ask():
            answers.append(await client.get("http://servers/model_info", timeout=None))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(60)
            assert not answers
            await run.servers.resume()
        assert answers[0].status_code == 200


async def test_a_server_that_does_not_answer_ends_with_the_clients_read_timeout(autojump_clock):
    async with (
        memory_world({"/slow": [Fault.HANG]}) as run,
        httpx.AsyncClient(transport=run.servers.httpx_transport()) as client,
    ):
        with pytest.raises(httpx.ReadTimeout, match="within 2"):
            await client.get("http://servers/slow", timeout=2.0)
        counts = run.servers.statistics()
        assert counts.servers[0].in_flight == 0
        assert counts.connections == 1  # the control connection: the other one was closed


async def test_closing_such_a_client_closes_no_connection_of_the_servers(autojump_clock):
    async with memory_world() as run:
        async with httpx.AsyncClient(transport=run.servers.httpx_transport()) as client:
            await client.get("http://servers/model_info")
        before = run.servers.statistics().connections
        await run.servers.generate(PROMPT, FIVE)
        assert run.servers.statistics().connections == before


class Drip:
    """A server that sends one event, and the rest when told to."""

    def __init__(self):
        self.more = trio.Event()
        self.connections = 0
        self.closed = 0
        self.host = "127.0.0.1"

    async def serve(self, stream):
        self.connections += 1
        async with stream:
            while head := await stream.receive_some(65536):
                if b"/events" in head:
                    await self._events(stream)
                else:
                    info = b'{"model_path":"x","is_generation":true}'
                    await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(info), info))
        self.closed += 1

    async def _events(self, stream):
        events = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await stream.send_all(events + b"d\r\ndata: first\n\n\r\n")
        await self.more.wait()
        await stream.send_all(b"e\r\ndata: second\n\n\r\n0\r\n\r\n")


@pytest.fixture
async def drip(nursery):
    """Such a server, and an httpx client over its connections."""
    server = Drip()
    (listener,) = await trio.open_tcp_listeners(0, host=server.host)
    nursery.start_soon(trio.serve_listeners, server.serve, [listener])
    url = f"http://{server.host}:{listener.socket.getsockname()[1]}"
    settings = ServerSettings(vocab_size=10, context_length=10)
    async with (
        open_sglang_servers([url], settings=settings) as server.servers,
        httpx.AsyncClient(transport=server.servers.httpx_transport(), base_url="http://servers") as server.client,
    ):
        yield server


async def test_events_come_as_they_are_sent_and_the_connection_is_used_again(drip):
    for _ in range(2):
        drip.more = trio.Event()
        async with drip.client.stream("GET", "/events") as answer:
            pieces = answer.aiter_text()
            assert await anext(pieces) == "data: first\n\n"
            assert drip.servers.statistics().servers[0].in_flight == 1
            drip.more.set()
            assert [piece async for piece in pieces] == ["data: second\n\n"]
        assert drip.servers.statistics().servers[0].in_flight == 0
    assert drip.servers.statistics().connections == 2  # control, and one for both streams


@pytest.mark.parametrize("how", ["cancelled", "left", "too slow"])
async def test_a_stream_that_is_not_read_to_its_end_closes_its_connection(drip, how):
    async def read():
        async with drip.client.stream("GET", "/events", timeout=0.05 if how == "too slow" else None) as answer:
            if how != "left":
                assert [piece async for piece in answer.aiter_text()] == "never"

    before = drip.servers.statistics().connections
    if how == "too slow":
        with pytest.raises(httpx.ReadTimeout):
            await read()
    else:
        with trio.move_on_after(0.05):
            await read()
    counts = drip.servers.statistics()
    assert (counts.servers[0].in_flight, counts.connections) == (0, before)


async def test_openais_stream_comes_event_by_event(autojump_clock, quick_client):
    async with memory_world(speaks_openai_and_anthropic) as run, quick_client(run) as client:
        policy = openai.AsyncOpenAI(base_url="http://servers/v1", api_key="-", http_client=client, max_retries=0)
        stream = await policy.chat.completions.create(model="policy", messages=ASKED, stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["six"]
        assert run.servers.statistics().servers[0].in_flight == 0
