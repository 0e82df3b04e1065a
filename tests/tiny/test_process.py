"""The server in a child process, and over real sockets."""

import signal
import subprocess
import sys

import httpx
import psutil
import pytest
import trio

from trio_rollout.errors import ServerLost
from trio_rollout.tiny import TinySettings, open_tiny_process, open_tiny_server

from ._client import request


async def generate(url: str, **body: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        return await http.post("/generate", json=request(**body))


async def test_a_server_in_this_run_answers_over_tcp():
    async with open_tiny_server() as server:
        answer = (await generate(server.url, max_new_tokens=5)).json()
        assert len(answer["output_ids"]) == 5
        assert server.url.startswith("http://127.0.0.1:")
        url = server.url

    with pytest.raises(httpx.ConnectError):
        await generate(url)


async def test_a_killed_server_breaks_every_connection_and_frees_its_port():
    async with open_tiny_server(TinySettings(step_delay=0.01)) as server, trio.open_nursery() as nursery:

        async def doomed() -> None:
            with pytest.raises(httpx.TransportError):
                await generate(server.url, max_new_tokens=100_000)

        for _ in range(3):
            nursery.start_soon(doomed)
        while server.statistics().running < 3:
            await trio.sleep(0.01)
        server.kill()
        with pytest.raises(httpx.ConnectError):
            await generate(server.url)
        with pytest.raises(trio.BrokenResourceError, match="dead"):
            server.accept(trio.testing.memory_stream_pair()[0])


async def test_leaving_is_quick_with_requests_in_flight():
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery, open_tiny_server(TinySettings(step_delay=0.01)) as server:

            async def ignored() -> None:
                with pytest.raises(httpx.TransportError):
                    await generate(server.url, max_new_tokens=100_000)

            nursery.start_soon(ignored)
            while not server.statistics().running:
                await trio.sleep(0.01)


async def test_a_process_answers_is_killed_and_reaped():
    settings = TinySettings(max_running=3, seed=7, incremental=True, vocab=64, rows=10_000)
    async with open_tiny_process(settings) as process:
        pid = process.pid
        async with httpx.AsyncClient(base_url=process.url, timeout=30) as http:
            info = (await http.get("/server_info")).json()
        assert (info["max_running_requests"], info["incremental_streaming_output"], info["random_seed"]) == (3, True, 7)
        assert "running" in repr(process)
        assert process.returncode is None

    assert process.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(pid)


async def test_a_process_dies_of_a_token_outside_its_vocabulary():
    async with open_tiny_process() as process:
        with pytest.raises(httpx.TransportError):
            await generate(process.url, input_ids=[5, 999_999])
        with trio.fail_after(60):
            assert await process.wait() == 1


async def test_a_process_that_does_not_start_says_so(tmp_path):
    with pytest.raises(ServerLost, match="ended before it answered"):
        async with open_tiny_process(TinySettings(weights=tmp_path / "none.npz")):
            pytest.fail("it must not start")


async def test_a_process_ends_with_the_process_that_started_it():
    program = """
import trio
from trio_rollout.tiny import open_tiny_process
async def main():
    async with open_tiny_process() as process:
        print(process.pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""
    parent = await trio.lowlevel.open_process([sys.executable, "-c", program], stdout=subprocess.PIPE)
    async with parent.stdout:
        child = psutil.Process(int(await parent.stdout.receive_some(100)))
        parent.kill()
        await parent.wait()
    with trio.fail_after(60):
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await trio.sleep(0.02)
