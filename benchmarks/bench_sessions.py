"""CPU of one turn through the gateway, against calling the servers directly: `python benchmarks/bench_sessions.py`.

Three ways to the same turns on one tiny server in a process of its own: `servers.generate`; the gateway, with one connection for
all turns of a client; and an aiohttp gateway as peers write it (a session of its own to the server for each request, or one
for all), if aiohttp is installed. The clients are raw bytes on sockets, in a process of their own, so that what is measured
is the gateway alone: processor seconds of its process, divided by turns.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import click
import trio
from rich.console import Console
from rich.table import Table

from trio_rollout import Prompt, SamplingParams, open_sglang_servers
from trio_rollout.sessions import GatewaySettings, open_gateway
from trio_rollout.tiny import DATA, TinySettings, open_tiny_process

TOKENS = 32
SAMPLING = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
BODY = {"model": "policy", "messages": [{"role": "user", "content": "word " * 200}], "max_tokens": TOKENS}

# Reads a target and sends it the same request over and over on each of so many connections.
CLIENT = r"""
import json, socket, sys, threading
host, port, path, key, turns, at_once, body = sys.argv[1:]
data = body.encode()
head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
request = (head + f"content-length: {len(data)}\r\n\r\n").encode() + data

def client(count):
    with socket.create_connection((host, int(port))) as connection:
        file = connection.makefile("rb")
        for _ in range(count):
            connection.sendall(request)
            status, length = file.readline(), 0
            assert b" 200" in status, status
            while (line := file.readline().strip()):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            file.read(length)

threads = [threading.Thread(target=client, args=(int(turns) // int(at_once),)) for _ in range(int(at_once))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

PEER = r"""
import sys, aiohttp
from aiohttp import web
from trio_rollout._tokenizer import load_tokenizer
url, data, reuse = sys.argv[1], sys.argv[2], sys.argv[3] == "reuse"
tokenizer = load_tokenizer(data)
shared = []

async def chat(request):
    body = await request.json()
    ids = tokenizer.apply_chat_template(body["messages"])
    payload = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": body["max_tokens"], "ignore_eos": True}}
    if reuse and not shared:
        shared.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    session = shared[0] if reuse else aiohttp.ClientSession()
    try:
        async with session.post(url + "/generate", json=payload) as answer:
            made = await answer.json()
    finally:
        if not reuse:
            await session.close()
    usage = {"completion_tokens": len(made["output_ids"])}
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": made["text"]}}], "usage": usage})

app = web.Application(client_max_size=2**25)
app.router.add_post("/v1/chat/completions", chat)

async def ready(_app):
    print("ready", flush=True)

app.on_startup.append(ready)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[4]), print=None)
"""


class Alone:
    """A rollout that only samples."""

    index = 0

    def __init__(self, generate: Callable[..., Awaitable[object]]) -> None:
        self._generate = generate

    async def generate(self, input_ids: object, sampling: object = None, *, on_tokens: object = None) -> object:
        """Sample one turn."""
        return await self._generate(input_ids, sampling, on_tokens=on_tokens)


def processor_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def send_turns(url: str, path: str, key: str, turns: int, at_once: int) -> None:
    """Have another process send the turns."""
    host, port = url.removeprefix("http://").split(":")
    arguments = [host, port, path, key, str(turns), str(at_once), json.dumps(BODY)]
    await trio.run_process([sys.executable, "-c", CLIENT, *arguments])


async def direct(server: str, turns: int, at_once: int) -> float:
    """``servers.generate`` alone."""
    async with open_sglang_servers([server]) as servers:
        ids = list(range(300))

        async def client() -> None:
            for _ in range(turns // at_once):
                await servers.generate(ids, SAMPLING)

        before = time.process_time()
        async with trio.open_nursery() as nursery:
            for _ in range(at_once):
                nursery.start_soon(client)
        return (time.process_time() - before) / turns


async def through_gateway(server: str, turns: int, at_once: int) -> float:
    """The gateway: HTTP in, chat template, tokens, the same call, the record, HTTP out."""
    async with (
        open_sglang_servers([server]) as servers,
        open_gateway(servers, tokenizer=DATA, settings=GatewaySettings(max_concurrent_turns=at_once)) as gateway,
        gateway.open_session(Alone(servers.generate), prompt=Prompt(id="p", text="x"), sampling=SAMPLING) as session,  # type: ignore[arg-type]
    ):
        before = time.process_time()
        path = session.base_url.removeprefix(gateway.url) + "/chat/completions"
        await send_turns(gateway.url, path, session.api_key, turns, at_once)
        return (time.process_time() - before) / turns


async def through_peer(server: str, turns: int, at_once: int, python: str, *, reuse: bool) -> float | None:
    """A gateway on aiohttp; None if that is not installed."""
    port = 18_471 + reuse
    arguments = [python, "-c", PEER, server, str(DATA), "reuse" if reuse else "fresh", str(port)]
    async with trio.open_nursery() as nursery:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
        peer = await nursery.start(partial(trio.run_process, arguments, **quiet))  # type: ignore[arg-type]
        with trio.move_on_after(20):
            while peer.poll() is None:
                try:
                    await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                    break
                except OSError:
                    await trio.sleep(0.1)
        if peer.poll() is not None:
            return None
        before = processor_seconds(peer.pid)
        await send_turns(f"http://127.0.0.1:{port}", "/v1/chat/completions", "x", turns, at_once)
        used = processor_seconds(peer.pid) - before
        nursery.cancel_scope.cancel()
    return used / turns


async def measure(turns: int, at_once: int, python: str) -> list[tuple[str, float | None]]:
    """Milliseconds of processor time a turn, each way."""
    async with open_tiny_process(TinySettings(max_running=max(64, at_once))) as tiny:
        return [
            ("servers.generate", await direct(tiny.url, turns, at_once)),
            ("gateway", await through_gateway(tiny.url, turns, at_once)),
            ("aiohttp, a session a request", await through_peer(tiny.url, turns, at_once, python, reuse=False)),
            ("aiohttp, one session", await through_peer(tiny.url, turns, at_once, python, reuse=True)),
        ]


@click.command()
@click.option("--turns", default=1000, show_default=True)
@click.option("--at-once", default=16, show_default=True)
@click.option("--peer-python", default=sys.executable, help="A Python with aiohttp and this package.")
def main(turns: int, at_once: int, peer_python: str) -> None:
    """Measure and show."""
    table = Table("way", "CPU ms a turn")
    for name, seconds in trio.run(measure, turns, at_once, peer_python):
        table.add_row(name, "not installed" if seconds is None else f"{seconds * 1000:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
