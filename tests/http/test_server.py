"""The server's side of a connection: answers in order, a client that leaves, a head that does not end."""

import gc
import json
import weakref

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from trio_rollout._http.server import ClientGone, ServerConnection
from trio_rollout._http.server_reader import RequestReader

GET = b"GET /%d HTTP/1.1\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\ncontent-length: 2\r\n%b\r\n"


async def echo(connection, request):
    """Answer with the request."""
    await connection.reply_json(200, [request.method, request.path, request.body.decode()])


@pytest.fixture
async def served(nursery):
    """Serve one connection by a handler; the client's end, and what becomes of the server's."""

    def serve(handle=echo, **options):
        ours, theirs = memory_stream_pair()
        over = trio.Event()

        async def run():
            async with theirs:
                await ServerConnection(theirs, **options).serve(handle)
            over.set()

        nursery.start_soon(run)
        return ours, over

    return serve


async def answers(stream, count=None):
    """Read so many whole answers, or all until the end; their statuses and bodies."""
    found, data = [], b""
    while count is None or len(found) < count:
        received = await stream.receive_some()
        data += received
        while b"\r\n\r\n" in data:
            head, _, rest = data.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
            if len(rest) < length:
                break
            found.append((int(head.split()[1]), rest[:length]))
            data = rest[length:]
        if not received:
            break
    assert not data
    return found


async def test_pipelined_requests_are_answered_in_order(served, autojump_clock):
    """A slow answer is not overtaken by the next one."""

    async def handle(connection, request):
        await trio.sleep(5 - int(request.path[1:]))
        await echo(connection, request)

    stream, _ = served(handle)
    await stream.send_all(b"".join(GET % number for number in range(5)))

    assert [json.loads(body)[1] for _, body in await answers(stream, 5)] == [f"/{number}" for number in range(5)]


async def test_a_flood_of_requests_is_left_in_the_socket(served, autojump_clock):
    """Beyond a bound, what a client sends without waiting for answers is not read; all is answered in the end."""
    go = trio.Event()

    async def handle(connection, request):
        await go.wait()
        await echo(connection, request)

    reader = RequestReader()
    stream, over = served(handle, reader=reader)
    sent = 0

    async def flood():
        nonlocal sent
        for sent in range(200):
            await stream.send_all(GET % sent)
            await wait_all_tasks_blocked()
        await stream.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        await trio.sleep(1)
        assert reader.waiting < 20
        go.set()
        assert len(await answers(stream)) == 200
        await over.wait()


async def test_leaving_is_noticed_while_a_handler_runs(served, autojump_clock):
    """``gone`` is set at once; the handler itself decides what that means."""
    seen = []

    async def handle(connection, request):
        await connection.gone.wait()
        seen.append(trio.current_time())
        await trio.sleep(10)
        await echo(connection, request)

    stream, over = served(handle)
    start = trio.current_time()
    await stream.send_all(GET % 1)
    await trio.sleep(1)
    await stream.aclose()
    await over.wait()

    assert seen == [start + 1]
    assert trio.current_time() == start + 11


async def test_a_stream_of_events_is_cancelled_when_its_client_leaves(served, autojump_clock):
    left = trio.Event()

    async def produce(emit):
        try:
            await emit(b"1")
            await trio.sleep_forever()
        finally:
            left.set()

    async def handle(connection, request):
        del request
        with pytest.raises(ClientGone):
            await connection.events(produce)
        raise ClientGone

    stream, over = served(handle)
    await stream.send_all(GET % 1)
    received = b""
    while b"data: 1\n\n" not in received:
        received += await stream.receive_some()
    await stream.aclose()
    with trio.fail_after(1):
        await over.wait()

    assert left.is_set()


async def test_events_and_a_request_after_them(served):
    async def produce(emit):
        await emit(b"1")
        await emit(b"[DONE]")

    async def handle(connection, request):
        if request.path == "/0":
            await connection.events(produce)
        else:
            await echo(connection, request)

    stream, _ = served(handle)
    await stream.send_all(GET % 0 + GET % 1)
    expected = b"9\r\ndata: 1\n\n\r\nE\r\ndata: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n".lower()
    received = b""
    while not received.endswith(b"]"):
        received += await stream.receive_some()

    assert expected in received.lower()


async def test_a_client_is_told_to_continue_after_the_answers_before(served, autojump_clock):
    """100 Continue never comes into the middle of another answer."""

    async def handle(connection, request):
        await trio.sleep(1)
        await echo(connection, request)

    stream, _ = served(handle)
    await stream.send_all(GET % 0 + POST % (1, b"expect: 100-continue\r\n"))
    first = await answers(stream, 1)
    continued = await stream.receive_some()
    await stream.send_all(b"{}")

    assert (len(first), continued) == (1, b"HTTP/1.1 100 Continue\r\n\r\n")
    assert await answers(stream, 1) == [(200, b'["POST","/1","{}"]')]


async def test_a_head_that_does_not_end_is_refused_at_its_deadline(served, autojump_clock):
    """Each head has the whole time, however its bytes drip; a connection between two requests has no deadline."""
    stream, over = served(head_s=10.0)
    start = trio.current_time()
    await trio.sleep(100)
    await stream.send_all(GET % 1 + b"GET")
    assert (await answers(stream, 1))[0][0] == 200
    for byte in b" /2 HTTP/1.1\r\nx: y"[:9]:
        await trio.sleep(1)
        await stream.send_all(bytes([byte]))
    assert await answers(stream) == [(408, b"Invalid HTTP request received.")]
    await over.wait()

    assert trio.current_time() == start + 110


async def test_heads_that_end_in_time_are_not_refused_for_those_before(served, autojump_clock):
    """A client that always has the next head half sent is no client whose head does not end."""
    stream, _ = served(head_s=10.0)
    await stream.send_all(GET[:3])
    for number in range(20):
        await trio.sleep(6)
        await stream.send_all((GET % number)[3:] + GET[:3])
        assert [status for status, _ in await answers(stream, 1)] == [200]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"nonsense", 400),
        (b"GET /" + b"a" * 140_000, 431),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
    ],
)
async def test_damage_is_answered_behind_the_requests_before_it(served, data, status):
    stream, over = served()
    await stream.send_all(GET % 1 + data)

    assert [status for status, _ in await answers(stream)] == [200, status]
    await over.wait()


async def test_a_head_request_gets_no_body(served):
    stream, _ = served()
    await stream.send_all(b"HEAD / HTTP/1.1\r\n\r\n")
    assert (await stream.receive_some()).endswith(b"\r\ncontent-length: 15\r\n\r\n")


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"]
)
async def test_the_connection_ends_where_the_request_says_so(served, data):
    stream, over = served()
    await stream.send_all(data + GET % 1)

    assert len(await answers(stream)) == 1
    await over.wait()


async def test_a_handler_may_end_the_connection(served):
    async def handle(connection, request):
        connection.keep_open = False
        await echo(connection, request)

    stream, over = served(handle)
    await stream.send_all(GET % 1 + GET % 2)

    assert len(await answers(stream)) == 1
    await over.wait()


async def test_a_handlers_error_comes_out_as_itself():
    ours, theirs = memory_stream_pair()
    error = RuntimeError("the handler's")

    async def handle(connection, request):
        raise error

    await ours.send_all(GET % 1)
    with pytest.raises(RuntimeError) as caught:
        await ServerConnection(theirs).serve(handle)
    assert caught.value is error


async def test_a_connection_that_has_ended_is_freed_without_the_collector():
    """httptools and the reader hold each other; the reader lets go at the end."""
    ours, theirs = memory_stream_pair()
    reader = RequestReader()
    dead = weakref.ref(reader._parts)
    gc.disable()
    try:
        await ours.send_all(GET % 1)
        await ours.send_eof()
        await ServerConnection(theirs, reader).serve(echo)
        del reader
        assert dead() is None
    finally:
        gc.enable()
