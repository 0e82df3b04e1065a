"""One generate call against servers that misbehave: what comes out, what was sent, what is left open."""

from functools import partial

import pytest
import trio

from trio_rollout import SamplingParams, Stop
from trio_rollout._http import ConnectionBroken, Pool, parse_url, post_head, post_request, socket_connector
from trio_rollout.errors import RequestRejected, ServerError, ServerLost
from trio_rollout.sglang import ServerSettings
from trio_rollout.testing import Fault, Reply, Run

from .helpers import EXPECTED, FIVE, PROMPT, memory_world, socket_world

HARMLESS = [
    Fault.CHUNKED,
    Fault.CLOSE_AFTER,
    Fault.CLOSE_QUIETLY,
    Fault.HTTP_1_0,
    Fault.CONTINUE_FIRST,
    Fault.DRIP,
]
BROKEN = [Fault.RESET, Fault.CLOSE, Fault.RESET_IN_BODY, Fault.SHORT_BODY, Fault.SHORT_CHUNKED]
DAMAGED = {
    Fault.LONG_BODY: "longer than the",
    Fault.GZIP: "content-encoding 'gzip'",
    Fault.NOT_HTTP: "not HTTP/1.1",
    Fault.MALFORMED_JSON: "not with an answer",
    Fault.WRONG_TYPE: "not with an answer",
    Fault.OTHER_ANSWER: "not for",
    Fault.NO_LOG_PROBS: "output_token_logprobs is missing",
    Fault.FEWER_LOG_PROBS: "5 output_ids but 4",
    Fault.OTHER_TOKEN: r"output_ids\[4\]",
    Fault.NULL_LOG_PROB: "output_token_logprobs.*null",
    Fault.NO_FINISH_REASON: "finish_reason",
}


@pytest.mark.parametrize("fault", [None, *HARMLESS])
@pytest.mark.parametrize("world", [memory_world, socket_world])
async def test_odd_but_legal_answers_are_answers(world, fault):
    """Chunks with trailers, HTTP/1.0, 100 Continue, Connection: close, a drip: the same Turn; and the next one works, too."""
    async with world([fault]) as run:
        run.fake.drip_s = 0.0
        for _ in range(2):
            turn = await run.servers.generate(PROMPT, FIVE)
            assert turn.output_ids.tolist() == EXPECTED
            assert turn.stop is Stop.LENGTH
        # A close that crosses a request: that request is aborted for safety, though it never arrived.
        assert not set(run.fake.aborts) & set(run.fake.generates)
        assert len(set(run.fake.generates)) == 2


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("world", [memory_world, socket_world])
async def test_f031_a_connection_that_breaks_after_sending_loses_the_request_and_aborts_it(world, fault):
    """Never a success, never sent again by us; the old request is aborted, the server stays usable, nothing stays open."""
    async with world([fault]) as run:
        with pytest.raises(ServerLost, match=run.fake.url):
            await run.servers.generate(PROMPT, FIVE)
        assert run.fake.aborts == run.fake.generates
        assert run.servers.statistics().servers[0].usable
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        assert run.servers.statistics().connections <= 3  # control, abort, generate


@pytest.mark.parametrize("fault", DAMAGED)
@pytest.mark.parametrize("world", [memory_world, socket_world])
async def test_a_damaged_answer_is_a_server_error_and_poisons_nothing(world, fault):
    async with world([fault]) as run:
        with pytest.raises(ServerError, match=DAMAGED[fault]) as caught:
            await run.servers.generate(PROMPT, FIVE)
        assert type(caught.value) is ServerError
        assert run.fake.url in str(caught.value)
        assert run.fake.generates[0] in str(caught.value)
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        not_http = fault in {Fault.LONG_BODY, Fault.GZIP, Fault.NOT_HTTP}  # nothing says that such a request has ended
        assert run.fake.aborts == (run.fake.generates[:1] if not_http else [])


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_f026_a_refusal_is_final_and_in_the_servers_words(autojump_clock, status):
    async with memory_world([Reply(status=status, body={"error": {"message": "too long"}})]) as run:
        with pytest.raises(RequestRejected, match="too long") as caught:
            await run.servers.generate(PROMPT, FIVE)
        assert caught.value.status == status
        assert len(run.fake.generates) == 1


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_f029_a_server_error_is_not_retried_here(autojump_clock, status):
    async with memory_world([Reply(status=status, body=b"<html>oops</html>")]) as run:
        with pytest.raises(ServerError, match=f"{status}.*oops"):
            await run.servers.generate(PROMPT, FIVE)
        assert len(run.fake.generates) == 1


async def test_ids_outside_the_vocabulary_are_never_sent(autojump_clock):
    async with memory_world() as run:
        with pytest.raises(RequestRejected, match="1000"):
            await run.servers.generate([1, 1000], FIVE)
        assert run.fake.generates == []


# --- busy servers


async def test_f026_busy_is_retried_after_what_the_server_asked_for(autojump_clock):
    """503 with Retry-After: the next try comes no sooner, under another rid."""
    plan = [Reply(status=503, headers={"Retry-After": "7"}), Reply(status=429, body={"error": "slow down"})]
    async with memory_world(plan) as run:
        turn = await run.servers.generate(PROMPT, FIVE)
        times = [seen.time for seen in run.fake.seen if seen.path == "/generate"]
        assert turn.rid == run.fake.generates[-1]
        assert len(set(run.fake.generates)) == 3
        assert 7 <= times[1] - times[0] <= 8
        assert 0 < times[2] - times[1] < 1
        assert run.fake.aborts == []


async def test_a_retry_after_of_a_year_is_bounded(autojump_clock):
    settings = ServerSettings(vocab_size=1000, retry_after_max=60)
    async with memory_world([Reply(status=503, headers={"Retry-After": "31536000"})], settings=settings) as run:
        await run.servers.generate(PROMPT, FIVE)
        assert trio.current_time() < 70


async def test_busy_for_good_ends_with_the_callers_deadline(autojump_clock):
    """Nothing of ours gives up: how patient to be is the caller's business. The tries thin out."""
    async with memory_world(lambda seen: Reply(status=503) if seen.path == "/generate" else None) as run:
        with trio.move_on_after(100) as scope:
            await run.servers.generate(PROMPT, FIVE)
        assert scope.cancelled_caught
        assert 20 < len(run.fake.generates) < 60
        assert run.servers.statistics().servers[0].in_flight == 0


async def test_f032_while_one_server_is_busy_the_other_is_asked_at_once(autojump_clock):
    async with memory_world([Reply(status=503, headers={"Retry-After": "50"})], ()) as run:
        began = trio.current_time()
        turns = [await run.servers.generate(PROMPT, FIVE) for _ in range(4)]
        assert trio.current_time() - began < 1
        assert len(turns) == 4
        assert len(run.fakes[0].generates) == 1
        assert len(run.fakes[1].generates) == 4


# --- stale keep-alive connections


async def test_f031_a_connection_that_was_closed_while_idle_is_replaced(autojump_clock):
    """A server that closes after its answer, without saying so: the next request succeeds, as one try."""
    async with memory_world([Fault.CLOSE_QUIETLY, Fault.CLOSE_QUIETLY]) as run:
        for _ in range(3):
            await run.servers.generate(PROMPT, FIVE)
        assert len(run.fake.generates) == 3


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.CLOSE])
@pytest.mark.parametrize("world", [memory_world, socket_world])
async def test_f031_a_reused_connection_that_dies_before_the_first_byte_is_retried_once(world, fault):
    """Sent once more on a new connection, under a fresh rid; the first one is aborted, in case the server has it."""
    async with world([None, fault]) as run:
        await run.servers.generate(PROMPT, FIVE)
        turn = await run.servers.generate(PROMPT, FIVE)
        first, second, third = run.fake.generates
        assert turn.rid == third
        assert len({first, second, third}) == 3
        assert run.fake.aborts == [second]


async def test_f029_the_second_connection_is_not_retried(autojump_clock):
    async with memory_world([None, Fault.CLOSE, Fault.CLOSE, None]) as run:
        await run.servers.generate(PROMPT, FIVE)
        with pytest.raises(ServerLost):
            await run.servers.generate(PROMPT, FIVE)
        assert len(run.fake.generates) == 3


async def test_idle_connections_are_closed_when_they_are_old(autojump_clock):
    async with memory_world() as run:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        before = run.fake.connections
        await trio.sleep(60)
        await run.servers.generate(PROMPT, FIVE)
        await trio.testing.wait_all_tasks_blocked()
        assert before >= 10
        assert run.fake.connections <= 2


# --- several servers


async def test_a_burst_spreads_evenly(autojump_clock):
    async with memory_world((), (), ()) as run:
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        assert [len(fake.generates) for fake in run.fakes] == [10, 10, 10]


async def test_the_least_loaded_server_is_chosen(autojump_clock):
    async with memory_world([Run()], [Run()], ()) as run, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(run.servers.generate, PROMPT, FIVE)
            await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            await run.servers.generate(PROMPT, FIVE)
        assert [len(fake.generates) for fake in run.fakes] == [1, 1, 5]
        nursery.cancel_scope.cancel()


async def test_a_session_stays_on_its_server_while_that_is_usable(autojump_clock):
    async with memory_world((), ()) as run:
        for key in ("a", "b", "a", "a", "b", "a"):
            await run.servers.generate(PROMPT, FIVE, affinity=key)
        assert sorted(len(fake.generates) for fake in run.fakes) == [2, 4]
        home = max(run.fakes, key=lambda fake: len(fake.generates))
        run.host(home).up = False
        await trio.sleep(10)  # its idle connections grow old
        other = next(fake for fake in run.fakes if fake is not home)
        before = len(other.generates)
        for _ in range(3):
            await run.servers.generate(PROMPT, FIVE, affinity="a")
        assert len(other.generates) == before + 3


async def test_session_keys_are_forgotten_oldest_first(autojump_clock):
    settings = ServerSettings(vocab_size=1000, affinity_keys=2)
    async with memory_world((), (), settings=settings) as run:
        for key in ("a", "b", "c", "b"):
            await run.servers.generate(PROMPT, FIVE, affinity=key)
        assert len(run.servers._fleet._affinity) == 2


async def test_a_refused_connection_was_never_sent_and_goes_elsewhere(autojump_clock):
    async with memory_world((), ()) as run:
        run.host().up = False
        await trio.sleep(10)
        for _ in range(5):
            await run.servers.generate(PROMPT, FIVE)
        assert len(run.fakes[1].generates) == 5
        assert [server.usable for server in run.servers.statistics().servers] == [False, True]


async def test_a_lost_server_comes_back_by_the_probe(autojump_clock):
    """Callers wait while no server is usable, and go on as soon as one answers /ready."""
    async with memory_world() as run:
        run.host().up = False
        await trio.sleep(10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.servers.generate, PROMPT, FIVE)
            await trio.sleep(20)
            assert not run.servers.statistics().servers[0].usable
            run.host().start()
        assert 30 <= trio.current_time() < 33
        assert len(run.fake.generates) == 1


async def test_f048_a_server_that_dies_is_lost_and_so_is_what_it_had(autojump_clock):
    """Its requests fail as lost, at once; what comes later goes to the others."""
    async with memory_world([Run(fault=Fault.RESET)] * 3, ()) as run:
        dying, other = run.fakes
        failures = []

        async def lose() -> None:
            with pytest.raises(ServerLost) as caught:
                await run.servers.generate(PROMPT, FIVE, affinity="x")
            failures.append(caught.value)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(lose)
            await dying.until(lambda: dying.in_flight == 3)
            run.host(dying).kill()
        began = trio.current_time()
        turn = await run.servers.generate(PROMPT, FIVE, affinity="x")
        assert len(failures) == 3
        assert other.generates == [turn.rid]
        assert trio.current_time() - began < 1
        assert run.servers.statistics().orphans == 0


async def test_too_many_open_files_is_our_fault_and_loses_no_server(autojump_clock):
    async with memory_world() as run:
        real = run.net.connect

        async def none_left(address):
            await trio.lowlevel.checkpoint()
            raise OSError(24, "Too many open files")

        run.servers._fleet.servers[0].work._connect = none_left
        with pytest.raises(ServerError, match="this machine"):
            await run.servers.generate(PROMPT, FIVE)
        assert run.servers.statistics().servers[0].usable
        run.servers._fleet.servers[0].work._connect = real
        await run.servers.generate(PROMPT, FIVE)


async def test_a_connect_without_an_answer_loses_the_server(autojump_clock):
    async with memory_world((), settings=ServerSettings(vocab_size=1000, connect=5, probe=1000)) as run:
        run.host().partition()
        with trio.move_on_after(30) as scope:
            await run.servers.generate(PROMPT, FIVE)
        assert scope.cancelled_caught
        assert "within 5 s" in run.servers._fleet.losses()[run.fake.url]
        assert run.servers.statistics().connections <= 1


async def test_a_large_request_is_sent_in_pieces(autojump_clock):
    async with memory_world() as run:
        prompt = [7] * 300_000
        turn = await run.servers.generate(prompt, FIVE)
        assert len(turn.prompt_ids) == 300_000
        assert len(run.fake.seen[-1].body["input_ids"]) == 300_000


async def test_a_large_answer_comes_whole_over_a_real_socket():
    """Larger than any socket buffer: received into one buffer of the announced length."""
    async with socket_world() as run:
        turn = await run.servers.generate(PROMPT, SamplingParams(max_new_tokens=60_000))
        assert len(turn.output_ids) == 60_000
        assert turn.log_probs[7] == pytest.approx(-0.5 - 7 / 8)


async def test_without_servers_in_sight_generate_waits_for_its_deadline(autojump_clock):
    async with memory_world() as run:
        run.host().kill()
        await trio.sleep(10)
        with trio.move_on_after(50) as scope:
            await run.servers.generate(PROMPT, FIVE)
        assert scope.cancelled_caught
        assert trio.current_time() == 60


@pytest.mark.parametrize("kept", [True, False], ids=["kept alive", "to be closed"])
async def test_a_request_is_refused_while_it_is_still_being_sent(kept):
    """A server that answers after the first bytes, reads no more and does not close: its answer counts, its connection is gone."""
    connections = "keep-alive" if kept else "close"
    refusal = f"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: {connections}\r\n\r\nno".encode()

    async def refuse(stream):
        await stream.receive_some(1000)
        await stream.send_all(refusal)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), refuse, 0)
        address = parse_url(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        pool = Pool(address, socket_connector(), max_idle=2, idle_s=60, connect_s=10)
        with await pool.take() as exchange:
            await exchange.send(post_request(post_head(address, "/generate"), bytes(50_000_000)))
            assert (await exchange.receive()).status == 413
        assert pool.connections == 0
        nursery.cancel_scope.cancel()


async def test_a_connection_that_ends_while_a_request_is_being_sent_is_broken():
    async def leave(stream):
        await stream.receive_some(1000)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), leave, 0)
        address = parse_url(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        pool = Pool(address, socket_connector(), max_idle=2, idle_s=60, connect_s=10)
        with await pool.take() as exchange, pytest.raises(ConnectionBroken):
            await exchange.send(post_request(post_head(address, "/generate"), bytes(50_000_000)))
        assert pool.connections == 0
        nursery.cancel_scope.cancel()
