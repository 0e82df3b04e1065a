"""Failures from the field: requests that are sent again, and more turns at once than are sampled."""

import anthropic
import httpx
import openai
import pytest
import trio

from trio_rollout.gateway._protocol import Refusal
from trio_rollout.testing import FakeServers, Say

from .test_http_faults import until
from .virtual import ask, asks, lone_session

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

QUESTION = [{"role": "user", "content": "anything"}]
APIS = ["chat", "responses", "messages"]
PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}


def body_of(api, *, stream=False, limit=12):
    """Return one request in this protocol; the same at every call."""
    if api == "responses":
        return {"model": "policy", "input": QUESTION, "max_output_tokens": limit, "stream": stream}
    return {"model": "policy", "messages": QUESTION, "max_tokens": limit, "stream": stream}


async def send(session, api, *, stream=False, limit=12, **headers):
    """Send the request once, as it is, and return the answer."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        return await client.post(
            session.base_url + PATHS[api],
            json=body_of(api, stream=stream, limit=limit),
            headers={"authorization": f"Bearer {session.api_key}", **headers},
        )


class Vendor:
    """A vendor's own client, which sends a refused request again; returns the id of the answer."""

    def __init__(self, api, session, *, stream):
        self.api, self.stream = api, stream
        kind = anthropic.AsyncAnthropic if api == "messages" else openai.AsyncOpenAI
        self.client = kind(base_url=session.base_url, api_key=session.api_key, max_retries=8, timeout=60)

    async def ask(self):
        async with self.client as client:
            create = {
                "chat": lambda: client.chat.completions.create,
                "responses": lambda: client.responses.create,
                "messages": lambda: client.messages.create,
            }[self.api]()
            answer = await create(**body_of(self.api, stream=self.stream))
            if not self.stream:
                return answer.id
            ids = [self.id_of(event) async for event in answer]
            return ids[0]

    def id_of(self, event):
        inner = {"messages": "message", "responses": "response"}.get(self.api)
        return getattr(event, inner).id if inner and hasattr(event, inner) else getattr(event, "id", None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_f141_identical_requests_at_once_get_an_answer_each(run_agent_once, api, stream):
    """A client whose first try is refused gets a new answer, and not that of another request that looks the same."""
    ids = []

    async def agent(session):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(one_of_them, session)

    async def one_of_them(session):
        ids.append(await Vendor(api, session, stream=stream).ask())

    settings = {"max_concurrent_turns": 2, "max_waiting_turns": 0}
    trajectory = await run_agent_once(agent, gateway=settings, tiny={"step_delay": 0.005})

    assert len(set(ids)) == 6
    assert trajectory.turns == 6


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_f141_a_delivered_answer_is_never_given_again(run_agent_once, api, stream):
    """The retry count of a client says that its first try failed, not that this gateway answered that try."""

    async def agent(session):
        first = await send(session, api, stream=stream)
        again = await send(session, api, stream=stream, **{"x-stainless-retry-count": "1"})
        assert first.status_code == again.status_code == 200
        assert first.text != again.text

    assert (await run_agent_once(agent)).turns == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_f141_a_request_with_its_own_key_is_the_same_turn(run_agent_once, api, stream):
    async def agent(session):
        named = {"idempotency-key": "mine"}
        first = await send(session, api, stream=stream, **named)
        assert (await send(session, api, stream=stream, **named)).text == first.text or stream
        assert session.statistics().resends == 1
        assert (await send(session, api, stream=stream, **{"idempotency-key": "other"})).text != first.text

    assert (await run_agent_once(agent)).turns == 2


async def test_f141_only_a_turn_that_no_request_waits_for_is_joined(autojump_clock, nursery):
    """An answer that was lost on its way is given to one of two requests that come for it, not to both."""
    async with lone_session() as (session, servers, _):
        with session.turn_for(asks("hello")) as lost:
            await lost.wait_over()
        with session.turn_for(asks("hello")) as first, session.turn_for(asks("hello")) as second:
            assert first is lost
            assert second is not lost
            await second.wait_over()
        assert servers.calls == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_f142_turns_beyond_the_limit_wait_for_their_place(run_agent_once, api, stream):
    stages, seen = [], []

    async def agent(session):
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one_of_them, session, number)
            await until(lambda: session.statistics().waiting > 0)
            seen.append(stages[0].tiny.statistics().running)

    async def one_of_them(session, number):
        answer = await send(session, api, stream=stream, limit=4 + number)
        assert answer.status_code == 200
        assert session.statistics().running <= 40

    trajectory = await run_agent_once(agent, stages=stages, tiny={"step_delay": 0.002})

    assert trajectory.turns == 40
    assert max(seen) <= 16


async def test_f142_a_turn_waits_in_the_order_of_requests_and_not_longer_than_it_may(autojump_clock):
    """Places are handed on in turn; a turn that gets none in time is told to try again; a client that leaves gives up its place."""
    ended = []

    async def named(session, name):
        try:
            await ask(session, asks(name))
            ended.append((name, trio.current_time()))
        except Refusal as refusal:
            ended.append((name, trio.current_time(), refusal.status, refusal.headers["x-should-retry"]))

    servers = FakeServers(plan=lambda number, prompt: Say(seconds=4))
    settings = {"max_concurrent_turns": 1, "max_waiting_turns": 4, "wait_seconds": 10, "drain": 100}
    async with lone_session(servers, **settings) as (session, _, _), trio.open_nursery() as nursery:
        for name in ("a", "b", "c", "d", "e"):
            nursery.start_soon(named, session, name)
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Refusal, match="the limit is 1, and 4 more may wait") as refused:
            await ask(session, asks("too many"))
        assert refused.value.status == 429
        assert session.statistics().waiting == 4

    assert sorted(ended, key=lambda end: end[1:2] + end[:1]) == [
        ("a", 4),
        ("b", 8),
        ("d", 10, 429, "true"),
        ("e", 10, 429, "true"),
        ("c", 12),
    ]
    assert servers.calls == 3


async def test_f142_a_client_that_leaves_while_it_waits_costs_no_request(autojump_clock):
    servers = FakeServers(plan=lambda number, prompt: Say(seconds=4))
    async with lone_session(servers, max_concurrent_turns=1) as (session, _, _), trio.open_nursery() as nursery:
        nursery.start_soon(ask, session, asks("a"))
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await ask(session, asks("gone"))
        await trio.testing.wait_all_tasks_blocked()
        assert (session.statistics().running, session.statistics().waiting) == (1, 0)
    assert servers.calls == 1
