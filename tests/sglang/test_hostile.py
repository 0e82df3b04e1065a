"""Servers that send too much, too fast, or what cannot be: no answer stops the engine, and none that is impossible is delivered.

F117 (prefix caches that outlive a weight update) is not here: it is about what runs on good servers, and has its tests with the
cache salts of requests.
"""

from contextlib import suppress

import httpx
import pytest
import trio

from trio_rollout import Deadlines
from trio_rollout._http import BadResponse
from trio_rollout._http.reader import HEADERS_LIMIT, INTERIM_LIMIT, ResponseReader
from trio_rollout.errors import ServerError
from trio_rollout.testing import Reply

from .flood import ENDLESS, OK, flooded_world
from .helpers import FIVE, PROMPT, memory_world

SHARE = 512 * 1024
"""Bytes: what one connection may be read for between two checkpoints, a cancelled call's last look included."""
KINDS = pytest.mark.parametrize("kind", ENDLESS)


@KINDS
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_f111_a_server_that_sends_without_end_ends_by_a_limit_or_the_deadline(mock_clock, kind, streamed):
    """Whatever it sends, other tasks run, the deadline fires within 0.1 s, and the connection is closed."""
    async with flooded_world(mock_clock) as run:
        run.flood(kind)
        view = run.servers.under(Deadlines(abort=0.05))
        more = {"on_progress": lambda: None, "on_tokens": lambda _: None} if streamed else {}
        ended = None
        with trio.move_on_after(1.0) as scope:
            try:
                await view.generate(PROMPT, FIVE, **more)
            except ServerError as error:
                ended = error
        assert scope.cancelled_caught or ended is not None
        assert trio.current_time() - scope.deadline <= 0.05 + 0.1
        assert max(flood.most for flood in run.floods) <= SHARE
        assert run.floods[0].closed


@pytest.mark.parametrize("kind", [kind for kind in ENDLESS if kind != "half a line"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_f111_without_a_deadline_an_endless_answer_ends_by_its_limits(mock_clock, kind, streamed):
    """For five tokens a server may send a few MB, and then the request fails by an error that names the limit."""
    async with flooded_world(mock_clock) as run:
        run.flood(kind)
        view = run.servers.under(Deadlines(abort=0.05))
        more = {"on_progress": lambda: None} if streamed else {}
        with pytest.raises(
            ServerError, match=r"allowed|more than|longer than|not HTTP|not with an answer|too much framing"
        ):
            await view.generate(PROMPT, FIVE, **more)
        assert max(flood.total for flood in run.floods) <= 32 << 20


@KINDS
async def test_f111_the_same_holds_for_control_calls(mock_clock, kind):
    async with flooded_world(mock_clock) as run:
        mock_clock.jump(5)
        await trio.testing.wait_all_tasks_blocked()  # the idle connections are closed
        run.flood(kind)
        view = run.servers.under(Deadlines(control=0.5))
        before = trio.current_time()
        health = await view.health()
        assert not any(health.values())
        assert trio.current_time() - before <= 0.5 + 0.1
        assert max(flood.most for flood in run.floods) <= SHARE


@KINDS
async def test_f111_the_same_holds_for_a_users_httpx_client(mock_clock, kind):
    async with flooded_world(mock_clock) as run, httpx.AsyncClient(transport=run.servers.httpx_transport()) as client:
        run.flood(kind)
        with trio.move_on_after(1.0) as scope:
            try:
                async with client.stream("POST", "http://servers/v1/x", timeout=0.5) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
            except httpx.TransportError:
                pass
        assert trio.current_time() - scope.deadline <= 0.1
        assert max(flood.most for flood in run.floods) <= SHARE


async def test_f111_other_requests_go_on_beside_a_flood(mock_clock):
    """A good server answers as many requests in the time as it would alone."""
    async with flooded_world(mock_clock) as run, trio.open_nursery() as nursery:
        run.flood("one chunk")
        nursery.start_soon(flooded, run)
        while not run.floods:
            await trio.lowlevel.checkpoint()
        run.flood(None)
        for _ in range(20):
            await run.servers.generate(PROMPT, FIVE)
        nursery.cancel_scope.cancel()


async def flooded(run):
    with trio.move_on_after(1000):
        with suppress(ServerError):
            await run.servers.under(Deadlines(abort=0.05)).generate(PROMPT, FIVE, extra={"return_routed_experts": True})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * (INTERIM_LIMIT + 1), "1xx"),
        (OK + b"".join(b"x%d: y\r\n" % number for number in range(HEADERS_LIMIT + 1)) + b"\r\n", f"{HEADERS_LIMIT}"),
        (OK + b"x: " + b"y" * 70_000 + b"\r\n\r\n", "head is longer"),
        ((b"HTTP/1.1 103 E\r\nx: " + b"y" * 4000 + b"\r\n\r\n") * 20, "head is longer"),
        (b"\r\n\r\n" + OK + b"content-length: 0\r\n\r\n", "not HTTP"),
        (OK + b"content-length: " + b"0" * 5000 + b"1\r\n\r\nx", "digits"),
        (OK + b"content-length: 9999999999\r\n\r\n", "allowed"),
    ],
    ids=["1xx", "headers", "one header", "1xx bytes", "empty line", "zeros", "length"],
)
def test_f111_what_precedes_a_body_is_bounded(data, words):
    with pytest.raises(BadResponse, match=words):
        received(data)


def received(data, **limits):
    """Feed ``data`` to a reader and return it."""
    reader = ResponseReader(memoryview(bytearray(65536)))
    for name, value in limits.items():
        setattr(reader, name, value)
    rest = memoryview(data)
    while rest and reader.response is None:
        buffer = reader.buffer()
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        reader.received(count)
        rest = rest[count:]
    return reader


def test_f112_a_buffer_grows_with_what_arrives():
    """An announced gigabyte and one byte take no gigabyte."""
    reader = received(OK + b"content-length: 1000000000\r\n\r\nx")
    assert len(reader.buffer()) <= 1 << 20


@pytest.mark.parametrize("size", [0, 1, 65_000, 262_143, 262_144, 262_145, 524_288, 1_000_000])
def test_f112_a_body_of_any_length_comes_whole(size):
    """At the borders of the buffer's sizes, too."""
    body = bytes(range(256)) * (size // 256 + 1)
    reader = received(OK + b"content-length: %d\r\n\r\n%b" % (size, body[:size]))
    assert bytes(reader.response.body) == body[:size]
    with pytest.raises(BadResponse, match="longer than"):
        received(OK + b"content-length: %d\r\n\r\n%b" % (size, body[:size] + b"x"))


@pytest.mark.parametrize("framing", ["announced", "chunked", "until the end"])
def test_f112_a_body_beyond_its_limit_is_refused_by_the_limit(framing):
    """The limit is stated in the error, for each framing."""
    body = b"x" * 5000
    data = {
        "announced": OK + b"content-length: 5000\r\n\r\n" + body,
        "chunked": OK + b"transfer-encoding: chunked\r\n\r\n1388\r\n" + body + b"\r\n0\r\n\r\n",
        "until the end": OK + b"\r\n" + body,
    }[framing]
    with pytest.raises(BadResponse, match="4999"):
        received(data, body_limit=4999)
    assert received(data, body_limit=5000).response is not None or framing == "until the end"


async def test_f112_an_answer_may_be_as_long_as_its_request_needs(mock_clock):
    """The limit follows the request: a plain one of five tokens gets no announced gigabyte."""
    async with flooded_world(mock_clock) as run:
        run.switch["kind"] = (OK + b"content-length: 1000000000\r\n\r\n", lambda _: b"x")
        with pytest.raises(ServerError, match=r"announces 1000000000 bytes, allowed: 1\d{6}"):
            await run.servers.under(Deadlines(abort=0.05)).generate(PROMPT, FIVE)


async def test_f112_the_answer_to_a_control_call_is_bounded_too(autojump_clock):
    """Four MiB are decoded in a moment; more is refused before it is read."""
    async with memory_world() as run:
        body = b'{"model_path":"x","weight_version":"5","more":"%b"}' % (b"x" * (5 << 20))
        run.fake.plan = lambda seen: Reply(body=body) if seen.path == "/model_info" else None
        assert await run.servers.versions() == {}
        assert "allowed: 4194304" in run.servers._fleet.losses()[run.fake.url]
