"""Hostile requests to the proxy: each ends at most its own connection, and the policy goes on."""

import base64

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trio_rollout.tools import open_proxy_policy
from trio_rollout.tools._network import AllowedHosts, Target

# Names that the list allows and that can't be asked for: IDNA and the resolver refuse them, each in its own way.
UNASKABLE = [
    "a" * 70 + ".example.org",
    "x..example.org",
    ".example.org",
    "a\x00b.example.org",
    "-.example.org",
    "xn--\x7f.example.org",
    ("a." * 200) + "example.org",
    "[.example.org",
    "a b.example.org",
    "%00.example.org",
]


class NoNames(trio.abc.HostnameResolver):
    """A resolver that knows no name, and is as strict about names as the real one."""

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # ruff: ignore[builtin-argument-shadowing]  the interface's name
        await trio.lowlevel.checkpoint()
        raise trio.socket.gaierror(f"there is no {host!r}")

    async def getnameinfo(self, sockaddr, flags):
        raise NotImplementedError


async def ask(policy, head):
    """Send ``head`` on a new connection, close its sending side, and return the answer."""
    async with await trio.open_tcp_stream("127.0.0.1", policy._port) as stream:
        answer = b""
        try:
            await stream.send_all(head)
            await stream.send_eof()
            with trio.fail_after(120):
                while chunk := await stream.receive_some():
                    answer += chunk
        except trio.BrokenResourceError:
            pass  # a proxy may hang up on what it does not want to read to its end
        return answer


def authorization(grant):
    token = grant.env["http_proxy"].split("session:")[1].split("@")[0]
    return b"Proxy-Authorization: Basic " + base64.b64encode(f"session:{token}".encode())


async def still_serves(policy):
    return (await ask(policy, b"CONNECT example.org:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 407")


@pytest.mark.parametrize("host", UNASKABLE)
async def test_an_allowed_name_that_cannot_be_asked_for_is_refused_and_the_policy_goes_on(host):
    trio.socket.set_custom_hostname_resolver(NoNames())
    async with open_proxy_policy(["*.example.org"]) as policy:
        head = b"CONNECT %b:443 HTTP/1.1\r\n%b\r\n\r\n" % (host.encode(), authorization(policy.grant()))
        answer = await ask(policy, head)

        assert answer[:12] in {b"HTTP/1.1 400", b"HTTP/1.1 403", b"HTTP/1.1 502"}
        assert await still_serves(policy)


PIECES = st.one_of(
    st.sampled_from([
        b"CONNECT ", b"GET ", b"http://", b"//", b":443", b":0", b":99999", b":-1", b" HTTP/1.1", b" HTTP/9.9", b"\r\n", b"\n", b"\r\n\r\n",
        b"a.example.org", b"*.example.org", b"[::1", b"[fe80::1%25x]", b"\xff.example.org", b"x" * 64 + b".example.org", b"@", b"\x00",
        b"Host: ", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"Upgrade: h2c", b"Proxy-Authorization: Basic ", b"AUTH", b"=", b"?", b"#",
    ]),
    st.binary(max_size=12),
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(heads=st.lists(st.lists(PIECES, max_size=12), min_size=1, max_size=4))
def test_no_request_ends_the_policy(heads):
    async def main():
        trio.socket.set_custom_hostname_resolver(NoNames())
        async with open_proxy_policy(["*.example.org"]) as policy:
            line = authorization(policy.grant())
            for pieces in heads:
                await ask(policy, b"".join(pieces).replace(b"AUTH", line) + b"\r\n" + line + b"\r\n\r\n")
            assert await still_serves(policy)

    trio.run(main)


async def test_a_session_that_opens_connections_without_end_is_turned_away():
    async with open_proxy_policy([], connections=3) as policy, trio.open_nursery() as nursery:
        idle = [await trio.open_tcp_stream("127.0.0.1", policy._port) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked(0.05)

        assert await ask(policy, b"") == b""
        for stream in idle:
            nursery.start_soon(stream.aclose)


@pytest.mark.parametrize("pattern", ["example.org:https", "example.org:", "example.org:0", "example.org:70000", ""])
def test_a_list_that_means_nothing_is_refused_where_it_is_written(pattern):
    with pytest.raises(ValueError, match="allowed hosts"):
        AllowedHosts([pattern])


def test_a_trailing_dot_or_a_capital_is_the_same_name():
    assert AllowedHosts(["*.example.org"]).allows(Target("A.EXAMPLE.ORG.", 1))
