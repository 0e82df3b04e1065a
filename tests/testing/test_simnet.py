"""The simulated network treats connections as a real one does, and both ends see what TCP would show them."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import trio
from trio.testing import check_half_closeable_stream

from trio_rollout._http import Connection, parse_url
from trio_rollout.testing import Link, NetFaults, SimNet, SimStream, open_sim_net, sim_run
from trio_rollout.testing._sim.connection import PlannedFault, Wire

URL = "http://a:1"
PLAIN = Link(latency=(0.01, 0.01), split=0.0)


async def echo(stream: trio.abc.Stream) -> None:
    """Send back everything received, until the end."""
    async with stream:
        async for data in stream:
            await stream.send_all(data)


async def tolerant(stream: trio.abc.Stream) -> None:
    """``echo`` for clients that break off."""
    with suppress(trio.BrokenResourceError):
        await echo(stream)


async def deaf(stream: trio.abc.Stream) -> None:
    """Never read."""
    await trio.sleep_forever()


async def mute(stream: trio.abc.Stream) -> None:
    """Read, and send nothing."""
    async with stream:
        async for _ in stream:
            pass


def in_net(scenario: Callable, *, serve: Callable = echo, link: Link = PLAIN, seed: int = 0, **how) -> object:
    """Run ``scenario(net)`` in a network with one host."""

    async def main() -> object:
        async with open_sim_net({URL: serve}, rng=random.Random(seed), link=link, **how) as net:
            return await scenario(net)

    return sim_run(main, seed=seed, limit=1000).value


async def connect(net: SimNet) -> Connection:
    return await net.connect(parse_url(URL))


async def send(connection: Connection, data: bytes) -> None:
    """Send all of it."""
    while data:
        await connection.wait_writable()
        data = data[connection.send_now(data) :]


async def receive(connection: Connection, count: int) -> bytes:
    """Receive exactly this many bytes."""
    got, buffer = b"", bytearray(100_000)
    while len(got) < count:
        await connection.wait_readable()
        size = connection.recv_into_now(buffer)
        assert size
        got += buffer[:size]
    return got


async def test_the_server_side_is_a_trio_stream():
    """Trio's own tests of streams pass. They wait for tasks to block, so this network has no delay."""

    async def pair() -> tuple[SimStream, SimStream]:
        wire = Wire(Link(latency=(0.0, 0.0)), random.Random(0), Counter(), PlannedFault("", 0), lambda _: None)
        left, right = wire.ends()
        return SimStream(left), SimStream(right)

    async def clogged() -> tuple[SimStream, SimStream]:
        both = await pair()
        for stream in both:
            with trio.move_on_after(0.05):
                await stream.send_all(bytes(10**6))
        return both

    await check_half_closeable_stream(pair, clogged)


def test_bytes_arrive_in_order_after_a_delay():
    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        assert trio.current_time() == pytest.approx(0.02)
        data = bytes(random.Random(1).randbytes(300_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, connection, data)
            assert await receive(connection, len(data)) == data
        connection.close()
        connection.close()

    in_net(scenario)
    in_net(scenario, link=Link(latency=(0.01, 0.01), split=0.5, window=1000))


def test_the_calls_never_wait():
    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        assert connection.recv_into_now(bytearray(10)) is None
        sent = 0
        while count := connection.send_now(b"x" * 10_000):
            sent += count
        assert sent == PLAIN.window
        with trio.move_on_after(1) as scope:
            await connection.wait_readable()
        assert scope.cancelled_caught
        connection.close()

    in_net(scenario, serve=deaf)


def test_split_moves_less_than_it_could():
    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        await send(connection, b"x" * 1000)
        for _ in range(20):
            await send(connection, b"x" * 100)
        assert net.events["partial send"] > 3

    in_net(scenario, link=Link(split=0.9), serve=mute)


def test_the_server_closing_is_an_end_after_its_data():
    async def goodbye(stream: trio.abc.Stream) -> None:
        async with stream:
            await stream.send_all(b"bye")

    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        assert await receive(connection, 3) == b"bye"
        await connection.wait_readable()
        assert connection.recv_into_now(bytearray(10)) == 0
        connection.close()
        assert net.connections == 0

    in_net(scenario, serve=goodbye)


def test_the_client_closing_is_an_end_for_the_server_and_later_a_broken_pipe():
    seen: list[str] = []

    async def talk(stream: trio.abc.Stream) -> None:
        assert await stream.receive_some() == b"hello"
        assert await stream.receive_some() == b""
        seen.append("end")
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"too late")
        seen.append("broken")

    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        await send(connection, b"hello")
        connection.close()
        with pytest.raises(OSError, match="was closed"):
            connection.send_now(b"x")
        await trio.sleep(1)
        assert net.connections == 0

    in_net(scenario, serve=talk)
    assert seen == ["end", "broken"]


def test_closing_with_unread_bytes_is_a_reset_as_in_tcp():
    seen: list[str] = []

    async def talk(stream: trio.abc.Stream) -> None:
        await stream.send_all(b"unread")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        seen.append("reset")

    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        await connection.wait_readable()
        connection.close()
        await trio.sleep(1)

    in_net(scenario, serve=talk)
    assert seen == ["reset"]


def test_connecting_to_a_host_that_does_not_listen_fails():
    async def scenario(net: SimNet) -> None:
        with pytest.raises(OSError, match="no host"):
            await net.connect(parse_url("http://nowhere:1"))
        net.host(URL).kill()
        with pytest.raises(ConnectionRefusedError):
            await connect(net)
        net.host(URL).start()
        (await connect(net)).close()

    in_net(scenario)


def test_a_killed_server_resets_its_connections():
    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        await send(connection, b"work")
        await trio.sleep(1)
        net.host(URL).kill()
        await connection.wait_readable()
        with pytest.raises(ConnectionResetError):
            connection.recv_into_now(bytearray(10))
        connection.close()
        await trio.sleep(1)
        assert net.connections == 0

    in_net(scenario, serve=mute)


@pytest.mark.parametrize("sends", ["before the restart", "after it"])
def test_without_power_the_connection_is_half_open_until_an_end_sends(sends: str):
    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        await send(connection, b"work")
        await trio.sleep(1)
        net.host(URL).power_off()
        if sends == "before the restart":
            await send(connection, b"into the void")
        with trio.move_on_after(100) as scope:
            await connection.wait_readable()
        assert scope.cancelled_caught
        net.host(URL).start()
        if sends == "after it":
            with trio.move_on_after(100) as scope:
                await connection.wait_readable()
            assert scope.cancelled_caught
            await send(connection, b"are you there")
        await connection.wait_readable()
        with pytest.raises(ConnectionResetError):
            connection.recv_into_now(bytearray(10))
        connection.close()
        again = await connect(net)
        again.close()
        await trio.sleep(1)
        assert net.connections == 0

    in_net(scenario, serve=mute)


def test_a_partition_holds_everything_up_and_loses_nothing():
    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        net.host(URL).partition()
        await send(connection, b"held up")
        with trio.move_on_after(100) as silent:
            await connection.wait_readable()
        with trio.move_on_after(100) as unanswered:
            await connect(net)
        assert silent.cancelled_caught
        assert unanswered.cancelled_caught
        net.host(URL).mend()
        assert await receive(connection, 7) == b"held up"
        connection.close()

    in_net(scenario)


def test_an_end_that_a_partition_held_up_arrives_after_it():
    async def hang_up(stream: trio.abc.Stream) -> None:
        await trio.sleep(1)
        await stream.aclose()

    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        net.host(URL).partition()
        await trio.sleep(10)
        assert connection.recv_into_now(bytearray(1)) is None
        net.host(URL).mend()
        await connection.wait_readable()
        assert connection.recv_into_now(bytearray(1)) == 0
        connection.close()

    in_net(scenario, serve=hang_up)


def test_resetting_all_connections_leaves_the_server_running():
    async def scenario(net: SimNet) -> None:
        connection = await connect(net)
        net.host(URL).reset_connections()
        with pytest.raises(ConnectionResetError):
            connection.recv_into_now(bytearray(10))
        connection.close()
        again = await connect(net)
        await send(again, b"x")
        assert await receive(again, 1) == b"x"
        again.close()

    in_net(scenario, serve=tolerant)


def test_drawn_faults_happen_about_as_often_as_asked_and_repeat():
    async def attempt(net: SimNet) -> str:
        with trio.move_on_after(10) as scope:
            try:
                connection = await connect(net)
                try:
                    await send(connection, b"x" * 1000)
                    await receive(connection, 1000)
                finally:
                    connection.close()
            except OSError as error:
                return type(error).__name__
        return "timeout" if scope.cancelled_caught else "fine"

    async def scenario(net: SimNet) -> tuple[list[str], dict[str, int]]:
        return [await attempt(net) for _ in range(400)], dict(net.events)

    faults = NetFaults(refused=0.1, unanswered=0.1, reset=0.1, silent=0.1, within=2000)
    run = partial(in_net, scenario, serve=tolerant, faults=faults)
    outcomes, events = run()
    for name in ("refused", "unanswered", "reset", "silent"):
        assert 15 < events[name] < 70, events
    assert outcomes.count("timeout") == events["unanswered"] + events["silent"]
    assert outcomes.count("ConnectionRefusedError") == events["refused"]
    assert outcomes.count("fine") > 200
    assert run() == (outcomes, events)
    assert run(seed=1) != (outcomes, events)


def test_leaving_the_network_ends_its_servers():
    async def scenario(net: SimNet) -> None:
        await connect(net)
        await connect(net)

    in_net(scenario, serve=mute)
