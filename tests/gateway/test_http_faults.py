"""Clients that disconnect, hang or send nonsense, on real sockets: their turns end, nothing else is disturbed."""

import json
import socket
import struct
from pathlib import Path

import httpx
import psutil
import pytest
import trio

from trio_rollout.errors import RolloutError, SettingsError
from trio_rollout.gateway import GatewaySettings, run_agent

HELLO = {"model": "policy", "messages": [{"role": "user", "content": "say hello"}]}
FREE = {"model": "policy", "messages": [{"role": "user", "content": "free"}], "max_tokens": 200}


def raw_request(session, body, *, path="/v1/chat/completions", headers=()):
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    target = "/" + session.base_url.split("/", 3)[3] + path
    lines = [f"POST {target} HTTP/1.1", "host: x", f"authorization: Bearer {session.api_key}", *headers]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data


async def connected(session):
    host, port = session.base_url.split("/")[2].split(":")
    return await trio.open_tcp_stream(host, int(port))


def reset(stream):
    """Close with RST: a client that was killed."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


async def until(condition):
    """Wait until another task has made the condition true."""
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.01)


async def ask(session, body=HELLO, **headers):
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(
            f"{session.base_url}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {session.api_key}", **headers},
        )


async def test_a_client_that_drops_in_the_head_or_the_body(run_agent_once):
    async def agent(session):
        whole = raw_request(session, HELLO)
        for end in (10, whole.index(b"\r\n\r\n") + 20):
            stream = await connected(session)
            await stream.send_all(whole[:end])
            reset(stream)
        assert (await ask(session)).status_code == 200
        assert session.statistics().turns == 1

    assert (await run_agent_once(agent)).turns == 1


async def test_a_client_that_drops_while_it_waits_cancels_its_turn(run_agent_once):
    stages = []

    async def agent(session):
        stream = await connected(session)
        await stream.send_all(raw_request(session, FREE))
        tiny = stages[0].tiny
        await until(lambda: tiny.statistics().running == 1)
        reset(stream)
        await until(lambda: session.statistics().running == 0 and tiny.statistics().running == 0)
        assert (await ask(session)).status_code == 200

    assert (await run_agent_once(agent, stages=stages, tiny={"step_delay": 0.05})).turns == 1


async def test_a_client_that_drops_in_a_stream_cancels_its_turn_and_may_send_it_again(run_agent_once):
    stages = []

    async def agent(session):
        tiny = stages[0].tiny
        stream = await connected(session)
        await stream.send_all(raw_request(session, {**HELLO, "stream": True}))
        seen = b""
        while b'"content":"H' not in seen:
            seen += await stream.receive_some(4096)
        assert b"[DONE]" not in seen
        reset(stream)
        await until(lambda: session.statistics().running == 0 and tiny.statistics().running == 0)
        again = await ask(session, {**HELLO, "stream": True})
        assert again.text.endswith("data: [DONE]\n\n")

    trajectory = await run_agent_once(agent, stages=stages, tiny={"step_delay": 0.05})

    assert trajectory.turns == 1
    assert trajectory.text == "Hello, world! How are you?"


async def test_a_client_that_reads_nothing_does_not_hold_its_session_open(run_agent_once):
    async def agent(session):
        assert (await ask(session)).status_code == 200
        stream = await connected(session)
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await stream.send_all(raw_request(session, {**FREE, "stream": True}))
        hung.append(stream)
        await until(lambda: session.statistics().running == 1)

    hung = []
    assert (await run_agent_once(agent, tiny={"step_delay": 0.05}, gateway={"drain": 0.1})).turns == 1
    await hung[0].aclose()


async def test_a_connection_ends_when_its_client_closes_it(run_agent_once):
    """It does not stay until the keep-alive time is over: every agent that exits would leave a socket and tasks for minutes."""

    async def agent(session):
        port = int(session.base_url.split("/")[2].split(":")[1])
        for _ in range(5):
            assert (await ask(session)).status_code == 200
        await until(lambda: open_sockets(port) == 0)

    assert (await run_agent_once(agent)).turns == 5


def open_sockets(port):
    """Count the connections that the gateway on this port still has."""
    return sum(
        found.laddr.port == port and found.status in {"ESTABLISHED", "CLOSE_WAIT"}
        for found in psutil.Process().net_connections()
    )


async def test_nonsense_on_the_wire_disturbs_no_other_request(run_agent_once):
    async def agent(session):
        for nonsense in (
            b"\x16\x03\x01\x00",
            b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\0" * 9000,
        ):
            stream = await connected(session)
            await stream.send_all(nonsense)
            await stream.send_eof()
            with trio.move_on_after(2):
                while await stream.receive_some(4096):
                    pass
            await stream.aclose()
        chunked = raw_request(session, HELLO, headers=["transfer-encoding: chunked"])
        stream = await connected(session)
        await stream.send_all(chunked)
        reset(stream)
        assert (await ask(session)).status_code == 200

    assert (await run_agent_once(agent)).turns == 1


async def test_limits_of_body_head_and_path(run_agent_once):
    async def agent(session):
        large = await ask(session, {**HELLO, "padding": "x" * 20_000})
        assert large.status_code == 413
        assert large.json()["error"]["message"] == "the body is too large: at most 10000 bytes"
        async with httpx.AsyncClient() as client:
            url = f"{session.base_url}/chat/completions"
            assert (await client.get(url)).status_code == 405
            assert (await client.post(session.base_url + "/nothing")).status_code == 404
            assert (await client.head(session.base_url)).status_code == 200
            assert (await client.head(session.base_url.split("/s/")[0] + "/")).status_code == 200
            assert (await client.post(url, headers={"x": "y" * 200_000})).status_code == 431
        assert (await ask(session)).status_code == 200

    await run_agent_once(agent, gateway={"max_body": 10_000, "max_head": 2048})


async def test_one_session_cannot_use_another(run_agent_once):
    """Two rollouts at once: each key opens its own session only."""
    met, refused = [], []

    async def agent(session):
        met.append(session)
        await until(lambda: len(met) == 2)
        other = met[0] if session is met[1] else met[1]
        answer = await ask(session, authorization=f"Bearer {other.api_key}")
        refused.append(answer.status_code)
        assert answer.json()["error"]["type"] == "authentication_error"
        assert (await ask(session)).status_code == 200

    await run_agent_once(agent, samples=2)

    assert refused == [401, 401]


async def test_after_the_end_a_late_call_is_told_that_the_session_is_closed(open_stage):
    sessions = []

    async def agent(session):
        sessions.append(session)
        assert (await ask(session)).status_code == 200

    async with open_stage(agent) as stage:
        await stage.engine.next_batch(1)
        late = await ask(sessions[0])
        unknown = await ask(sessions[0], authorization="Bearer sk-guess")
        calls = sum(server.requests for server in stage.servers.statistics().servers)

    assert late.status_code == 503
    assert late.json()["error"]["message"] == "session closed"
    assert late.headers["x-should-retry"] == "false"
    assert unknown.status_code == 401
    assert calls == 1


async def test_a_server_that_dies_with_the_turn_ends_the_attempt(open_stage):
    """An infrastructure failure is never trained: the group is tried again, then quarantined, with the server's name."""
    stages, status = [], []

    async def agent(session):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_running_then_kill)
            status.append((await ask(session, FREE)).status_code)

    async def until_running_then_kill():
        await until(lambda: stages[0].tiny.statistics().running == 1)
        stages[0].tiny.kill()

    async with open_stage(agent, tiny={"step_delay": 0.05}, deadlines={"group": 3.0}) as stage:
        stages.append(stage)
        with pytest.raises(RolloutError, match="no group was delivered"):
            await anext(stage.engine.batches(1))
        assert stage.engine.statistics().quarantined == 1


async def test_closing_step_by_step_over_http(run_agent_once):
    """New requests get a 503, the running turn is delivered, and only then the session is closed."""
    stages, met = [], []

    async def agent(session):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def running():
                met.append(("running", (await ask(session, FREE)).status_code))

            await until(lambda: stages[0].tiny.statistics().running == 1)

            @nursery.start_soon
            async def close():
                await session.close()
                met.append(("closed", session.statistics().running))

            await until(lambda: session.is_closing)
            late = await ask(session)
            met.append(("late", late.status_code))
            assert late.json()["error"]["message"] == "session closed"

    trajectory = await run_agent_once(agent, stages=stages, tiny={"step_delay": 0.01}, gateway={"drain": 30})

    assert met[0] == ("late", 503)
    assert sorted(met[1:]) == [("closed", 0), ("running", 200)]
    assert trajectory.turns == 1


async def test_turns_that_outlast_the_drain_are_aborted_on_their_server_and_told_so(run_agent_once):
    """A whole answer becomes a 503, a stream ends in an error; neither is recorded."""
    stages, met = [], {}

    async def agent(session):
        assert (await ask(session)).status_code == 200
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def whole():
                met["whole"] = await ask(session, FREE)

            @nursery.start_soon
            async def streamed():
                met["streamed"] = await ask(session, {**FREE, "stream": True})

            await until(lambda: stages[0].tiny.statistics().running == 2)
            await session.close()
            assert stages[0].tiny.statistics().running == 0, "before the trajectory is made"

    trajectory = await run_agent_once(
        agent, stages=stages, tiny={"step_delay": 0.1}, gateway={"drain": 0.5, "agents_choose_temperature": True}
    )

    assert met["whole"].status_code == 503
    assert "session closed" in met["streamed"].text
    assert trajectory.turns == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_hangs_is_left_at_the_turns_deadline(open_stage, stream):
    """The turn's deadline ends the attempt, and its session with it: no client waits for ever."""
    told = []

    async def agent(session):
        told.append(await ask(session, {**FREE, "stream": stream}))

    options = {"tiny": {"step_delay": 60.0}, "deadlines": {"turn": 0.5, "abort": 0.5}}
    with trio.fail_after(60):
        async with open_stage(agent, **options) as stage:
            with pytest.raises(RolloutError, match="no group was delivered"):
                await anext(stage.engine.batches(1))
            (report,) = stage.engine.quarantined()
            assert stage.gateway.statistics().sessions == 0

    assert report.cause.value == "deadline"
    assert told == [], "its client was cancelled with it"


async def test_a_client_that_sends_its_body_for_ever_is_given_up(run_agent_once):
    async def agent(session):
        whole = raw_request(session, HELLO)
        stream = await connected(session)
        await stream.send_all(whole[:-5])
        with trio.fail_after(20):
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += await stream.receive_some(4096)
        assert answer.startswith(b"HTTP/1.1 408")
        await stream.aclose()
        assert (await ask(session)).status_code == 200

    assert (await run_agent_once(agent, gateway={"body_seconds": 0.3})).turns == 1


@pytest.mark.parametrize("limits", [{"seconds": 0.5}, {"seconds": 600}], ids=["over its time", "cancelled"])
async def test_an_agents_process_tree_is_dead_before_its_session_closes(open_stage, tmp_path, limits):
    """No process of the agent is left when ``run_agent`` returns, not even outside its group, and the session is open."""
    mark, found, working = str(tmp_path / "mark"), [], trio.Event()

    async def drain_while_it_works(engine):
        await working.wait()
        await engine.drain(grace=0.5)

    async def generate(_prompt, rollout):
        async with rollout.tools.open_sandbox() as sandbox, rollout.session() as session:
            assert (await ask(session)).status_code == 200
            working.set()
            line = f"setsid sh -c 'sleep 600; : {mark}' & sleep 600; : {mark}"
            try:
                ended = await run_agent(["sh", "-c", line], session, sandbox, **limits)
                assert ended.timed_out
            finally:
                found.append((agents_alive(mark), session.is_closing))
        return session.trajectory()

    async with open_stage(None, generate=generate) as stage, trio.open_nursery() as nursery:
        if limits["seconds"] == 600:
            nursery.start_soon(drain_while_it_works, stage.engine)
        batches = [batch async for batch in stage.engine.batches(1)]

    assert found == [(0, False)]
    assert len(batches) == (limits["seconds"] < 600)


def agents_alive(mark):
    return sum(is_agents(path, mark) for path in Path("/proc").glob("[0-9]*"))


def is_agents(process, mark):
    try:
        return mark in (process / "cmdline").read_text()
    except OSError:
        return False


def test_settings_say_what_is_wrong():
    with pytest.raises(SettingsError, match="max_turns: got 0"):
        GatewaySettings(max_turns=0)
