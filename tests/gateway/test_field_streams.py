"""Failures from the field: streams on which nothing comes for a while."""

import itertools
import json

import pytest
import trio

from trio_rollout import Prompt, SamplingParams
from trio_rollout.errors import ServerError
from trio_rollout.gateway import GatewaySettings, open_gateway
from trio_rollout.testing import HANG, Fail, FakeServers, Say
from trio_rollout.tiny import DATA

from .conftest import WEATHER
from .talk import APIS, talking
from .test_field_turns import PATHS, body_of
from .test_http_faults import connected, raw_request
from .virtual import LoneRollout, NoParser

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

ALIVE = {
    "chat": b'"delta":{"content":""}',
    "responses": b'"type":"response.in_progress"',
    "messages": b'{"type":"ping"}',
}


async def arrivals(session, api, seconds):
    """Ask for a stream; return what came, each piece with its time, until its end or for so long."""
    pieces, begun = [], trio.current_time()
    async with await connected(session) as stream:
        await stream.send_all(raw_request(session, body_of(api, stream=True), path=PATHS[api]))
        with trio.move_on_after(seconds):
            while got := await stream.receive_some():
                pieces.append((trio.current_time() - begun, got))
                if b'"finish_reason":"' in got or b'"message_stop"' in got or b'"response.completed"' in got:
                    break
    return pieces


@pytest.mark.parametrize("places", [1, 2], ids=["a turn that waits", "a call that is sampled"])
@pytest.mark.parametrize("api", APIS)
async def test_f148_a_stream_begins_within_seconds_and_is_never_silent(autojump_clock, api, places):
    """In a turn that waits for its place, and while nothing of an answer may be shown."""
    servers = FakeServers(plan=lambda number, prompt: HANG if number == 0 else Say(seconds=30))
    settings = GatewaySettings(max_concurrent_turns=places, heartbeat=2)
    async with open_gateway(servers, tokenizer=DATA, parser=NoParser(), settings=settings) as gateway:
        opened = gateway.open_session(LoneRollout(servers), prompt=Prompt(id="p", text="x"), sampling=SamplingParams())
        async with opened as session, trio.open_nursery() as nursery:
            nursery.start_soon(arrivals, session, "chat", 1000)
            await trio.testing.wait_all_tasks_blocked()
            pieces = await arrivals(session, api, 20)
            nursery.cancel_scope.cancel()

    times = [at for at, _ in pieces]
    assert times[0] <= 2
    assert pieces[0][1].startswith(b"HTTP/1.1 200")
    assert all(later - earlier <= 2.01 for earlier, later in itertools.pairwise(times))
    assert sum(ALIVE[api] in piece for _, piece in pieces) >= 6


@pytest.mark.parametrize("api", APIS)
async def test_f148_an_error_has_its_own_status_until_then_and_is_an_event_after(autojump_clock, api):
    for seconds, status in ((1.0, b"503"), (5.0, b"200")):
        plan = Fail(ServerError("down"), seconds=seconds)
        servers = FakeServers(plan=lambda number, prompt, plan=plan: plan)
        async with open_gateway(servers, tokenizer=DATA, parser=NoParser()) as gateway:
            opened = gateway.open_session(
                LoneRollout(servers), prompt=Prompt(id="p", text="x"), sampling=SamplingParams()
            )
            async with opened as session:
                written = b"".join(piece for _, piece in await arrivals(session, api, 20))
                assert written.split(b" ")[1] == status
                assert b"down" in written


@pytest.mark.parametrize("api", APIS)
async def test_f148_the_vendors_clients_read_over_the_heartbeats(run_agent_once, script, api):
    """A long tool call under a short read timeout, put together by the vendor's own helper."""
    command = "x" * 200
    call = {"name": "weather", "arguments": {"city": command}}
    script.write_text(
        f"[[rules]]\nanswer = {json.dumps(f'I call.<tool_call>{chr(10)}{json.dumps(call)}{chr(10)}</tool_call>')}\n"
    )

    async def agent(session):
        async with talking(session, (api, True), tools=[WEATHER]) as talk:
            talk.client = talk.client.with_options(timeout=1.0)
            said = await talk.user("the weather").ask()
            assert (said.text, said.calls[0].arguments) == ("I call.", {"city": command})

    options = {"gateway": {"heartbeat": 0.2}, "tiny": {"step_delay": 0.01}}
    assert (await run_agent_once(agent, **options)).turns == 1
