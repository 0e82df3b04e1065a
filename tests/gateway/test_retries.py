"""The vendors' own clients try again after a refusal where that can help, and only there."""

import anthropic
import openai
import psutil
import pytest
import trio

from trio_rollout import open_sglang_servers
from trio_rollout.gateway import GatewaySettings, open_gateway
from trio_rollout.tiny import DATA, TinySettings, open_tiny_server

from .test_http_faults import FREE, HELLO, ask, connected, raw_request, reset, until

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

VENDORS = ["openai", "anthropic"]


class Client:
    """A vendor's client that would try five times more; counts how often it sends its one request."""

    def __init__(self, vendor, session):
        self.sent = 0
        self.answered = 0
        hooks = {"request": [self.count_request], "response": [self.count_answer]}
        options = {"base_url": session.base_url, "api_key": session.api_key, "max_retries": 5}
        if vendor == "openai":
            http = openai.DefaultAsyncHttpxClient(event_hooks=hooks)
            self.client = openai.AsyncOpenAI(**options, http_client=http)
        else:
            http = anthropic.DefaultAsyncHttpxClient(event_hooks=hooks)
            self.client = anthropic.AsyncAnthropic(**options, http_client=http)

    async def count_request(self, _request):
        self.sent += 1

    async def count_answer(self, _response):
        self.answered += 1

    async def ask(self):
        async with self.client as client:
            if isinstance(client, openai.AsyncOpenAI):
                return await client.chat.completions.create(**HELLO)
            return await client.messages.create(**HELLO, max_tokens=8)


@pytest.mark.parametrize("vendor", VENDORS)
async def test_a_temporary_limit_is_tried_again(run_agent_once, vendor):
    """After a refusal for too many turns at once, the next try is answered when the other turn is over."""
    stages = []

    async def agent(session):
        other = await connected(session)
        await other.send_all(raw_request(session, FREE))
        await until(lambda: stages[0].tiny.statistics().running == 1)
        client = Client(vendor, session)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ask)
            await until(lambda: client.answered)
            reset(other)
        assert client.sent >= 2

    options = {"gateway": {"max_concurrent_turns": 1, "max_waiting_turns": 0}, "tiny": {"step_delay": 0.02}}
    assert (await run_agent_once(agent, stages=stages, **options)).turns == 1


@pytest.mark.parametrize("vendor", VENDORS)
async def test_a_lasting_limit_is_not_tried_again(run_agent_once, vendor):
    async def agent(session):
        assert (await ask(session)).status_code == 200
        client = Client(vendor, session)
        with pytest.raises((openai.RateLimitError, anthropic.RateLimitError), match="turns of this session"):
            await client.ask()
        assert client.sent == 1

    assert (await run_agent_once(agent, gateway={"max_turns": 1})).turns == 1


@pytest.mark.parametrize("vendor", VENDORS)
async def test_a_closed_session_is_not_tried_again(run_agent_once, vendor):
    async def agent(session):
        assert (await ask(session)).status_code == 200
        await session.close()
        client = Client(vendor, session)
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="session closed"):
            await client.ask()
        assert client.sent == 1

    assert (await run_agent_once(agent)).turns == 1


async def test_a_gateway_answers_so_many_requests_at_once(run_agent_once):
    stages = []

    async def agent(session):
        other = await connected(session)
        await other.send_all(raw_request(session, FREE))
        await until(lambda: stages[0].tiny.statistics().running == 1)
        refused = await ask(session)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "too many requests at once: at most 1"
        assert refused.headers["x-should-retry"] == "true"
        reset(other)
        await until(lambda: stages[0].gateway.statistics().requests == 0)
        assert (await ask(session)).status_code == 200

    options = {"gateway": {"max_requests": 1}, "tiny": {"step_delay": 0.02}}
    assert (await run_agent_once(agent, stages=stages, **options)).turns == 1


@pytest.mark.parametrize(
    ("settings", "address"), [({}, "127.0.0.1"), ({"host": "0.0.0.0", "public_url": "http://agents:1/"}, "0.0.0.0")]
)
async def test_it_listens_on_loopback_unless_told_otherwise(settings, address):
    before = listening()
    async with (
        open_tiny_server(TinySettings()) as tiny,
        open_sglang_servers([tiny.url]) as servers,
        open_gateway(servers, tokenizer=DATA, settings=GatewaySettings(**settings)) as gateway,
    ):
        port = int(tiny.url.rsplit(":", 1)[1])
        assert {ip for ip, other in listening() - before if other != port} == {address}
        assert gateway.url.startswith("http://agents:1" if settings else "http://127.0.0.1:")


def listening():
    """Return the addresses and ports that this process listens on."""
    found = psutil.Process().net_connections()
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}
