"""The network policy: a proxy with a list, which ends only the session that asks for another host."""

import base64
import sys
from functools import partial

import pytest
import trio

from trio_rollout._http.server_reader import split_head
from trio_rollout.tools import ExecLimits, ProcessFailed, SpawnError, open_proxy_policy
from trio_rollout.tools._exec.sessions import open_exec_sessions
from trio_rollout.tools._network import AllowedHosts, Request, Target


def read(head):
    """The proxy's view of a request, from the bytes of its head."""
    request, rest = split_head(head)
    assert not rest
    return Request(request)


@pytest.mark.parametrize(
    ("host", "port", "allowed"),
    [
        ("index.example", 443, True),
        ("Index.Example.", 80, True),
        ("files.hosted.example", 443, True),
        ("hosted.example", 443, False),  # what is below it, not itself
        ("evilhosted.example", 443, False),
        ("mirror.lan", 8080, True),
        ("mirror.lan", 443, False),
        ("evil.example", 443, False),
        ("127.0.0.1", 80, False),
    ],
)
def test_what_the_list_allows(host, port, allowed):
    hosts = AllowedHosts(["index.example", "*.Hosted.Example", "mirror.lan:8080"])

    assert hosts.allows(Target(host, port)) == allowed


def test_requests_are_read():
    tunnel = read(b"CONNECT index.example:443 HTTP/1.1\r\nHost: index.example:443\r\n\r\n")
    plain = read(
        b"GET http://mirror.example:8080/a?b=c HTTP/1.1\r\nHost: mirror.example\r\nProxy-Authorization: Basic "
        + base64.b64encode(b"session:t0ken")
        + b"\r\nConnection: keep-alive\r\n\r\n"
    )

    assert (tunnel.is_tunnel, tunnel.target, tunnel.token()) == (True, Target("index.example", 443), None)
    assert (plain.is_tunnel, plain.target, plain.token()) == (False, Target("mirror.example", 8080), "t0ken")
    assert plain.for_the_server() == b"GET /a?b=c HTTP/1.1\r\nHost: mirror.example\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET ftp://x/ HTTP/1.1\r\n\r\n",
        b"CONNECT /x HTTP/1.1\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
    ],
)
def test_what_is_no_request_to_a_proxy_is_refused(head):
    with pytest.raises(ValueError):  # ruff: ignore[pytest-raises-too-broad]  the parser's words
        read(head)


@pytest.fixture
async def service(nursery):
    """A server that answers each connection with hello; its port."""

    async def hello(stream):
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

    listeners = await nursery.start(partial(trio.serve_tcp, hello, 0, host="127.0.0.1"))
    return listeners[0].socket.getsockname()[1]


@pytest.fixture
async def policy(service):
    async with open_proxy_policy([f"127.0.0.1:{service}"]) as policy:
        yield policy


async def say(policy, request, *, token=None):
    """Send one request to the proxy and return its whole answer."""
    credentials = base64.b64encode(f"session:{token}".encode())
    async with await trio.open_tcp_stream("127.0.0.1", policy._port) as stream:
        await stream.send_all(request.replace(b"TOKEN", credentials))
        with trio.fail_after(120):
            answer = b""
            while chunk := await stream.receive_some():
                answer += chunk
        return answer


def token_of(grant):
    return grant.env["http_proxy"].split("session:")[1].split("@")[0]


def connect(port, host="127.0.0.1"):
    return b"CONNECT %b:%d HTTP/1.1\r\nProxy-Authorization: Basic TOKEN\r\n\r\n" % (host.encode(), port)


async def test_a_tunnel_to_an_allowed_host_is_bytes_both_ways(policy, service):
    grant = policy.grant()
    answer = await say(policy, connect(service) + b"GET / HTTP/1.1\r\n\r\n", token=token_of(grant))

    assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
    assert answer.endswith(b"hello")
    assert not grant.denied


async def test_a_plain_request_to_an_allowed_host_is_passed_on(policy, service):
    request = b"GET http://127.0.0.1:%d/x HTTP/1.1\r\nProxy-Authorization: Basic TOKEN\r\n\r\n" % service

    assert (await say(policy, request, token=token_of(policy.grant()))).endswith(b"hello")


async def test_anything_else_is_forbidden_and_denies_that_session_alone(policy, service):
    asking, other = policy.grant(), policy.grant()
    answer = await say(policy, connect(443, "evil.example"), token=token_of(asking))

    assert answer.startswith(b"HTTP/1.1 403 Forbidden")
    assert asking.message == "Network access to evil.example:443 was denied by the sandbox network proxy."
    assert not other.denied


async def test_without_a_sessions_token_nothing_is_reached(policy, service):
    assert (await say(policy, connect(service), token="guessed")).startswith(b"HTTP/1.1 407")
    assert (await say(policy, b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % service)).startswith(b"HTTP/1.1 407")


async def test_a_finished_session_has_no_token_any_more(policy, service):
    grant = policy.grant()
    grant.finish()

    assert (await say(policy, connect(service), token=token_of(grant))).startswith(b"HTTP/1.1 407")
    assert policy._grants == {}


async def test_a_host_that_is_down_is_a_bad_gateway_and_no_denial(service):
    async with open_proxy_policy(["127.0.0.1"]) as policy:
        grant = policy.grant()
        answer = await say(policy, connect(1), token=token_of(grant))

    assert answer.startswith(b"HTTP/1.1 502")
    assert not grant.denied


async def test_nonsense_is_a_bad_request(policy):
    assert (await say(policy, b"\x16\x03\x01\x00 not http\r\n\r\n")).startswith(b"HTTP/1.1 400")


FETCH = "import urllib.request, sys; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"


async def test_a_real_session_reaches_what_is_allowed(policy, service):
    async with open_exec_sessions(network=policy) as sessions:
        output = await sessions.exec_command(
            [sys.executable, "-c", FETCH, f"http://127.0.0.1:{service}/"], call_id="c", yield_time=20
        )

    assert (output.output, output.exit_code) == (b"hello\n", 0)
    assert policy._grants == {}


async def test_a_real_session_that_asks_for_more_is_ended(policy, service):
    async with open_exec_sessions(network=policy, limits=ExecLimits(late_denial=0.5)) as sessions:
        with pytest.raises(ProcessFailed, match=r"Network access to evil\.example:80 was denied"):
            await sessions.exec_command(
                [sys.executable, "-c", FETCH, "http://evil.example/"], call_id="c", yield_time=20
            )
        assert sessions.list_processes() == ()


async def test_a_session_that_never_started_gives_its_grant_back(policy):
    async with open_exec_sessions(network=policy) as sessions:
        with pytest.raises(SpawnError):
            await sessions.exec_command(["nosuchprogram"], call_id="c")

    assert policy._grants == {}
