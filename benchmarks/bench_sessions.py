"""CPU of one turn through the gateway, against calling the servers directly and against a gateway as peers write it.

The same turns on one tiny server in a separate process, by: `servers.generate`; the gateway, whole and streamed, with one
connection for all turns of a client; and an aiohttp gateway as peers write it (a new session to the server for each
request, or one for all), if aiohttp is installed. That one only applies the chat template, asks the server and answers: it
notices no client that leaves, and records nothing. The clients are raw bytes on sockets, in a process of their own, so that
what is measured is the gateway alone: processor seconds of its process, divided by turns.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import click
import trio
from harness.report import Report, bars, header, options, say_to_stderr
from harness.rounds import Run, figures_of, median_of, ratio

from trio_rollout import Prompt, SamplingParams, open_sglang_servers
from trio_rollout.gateway import GatewaySettings, open_gateway
from trio_rollout.tiny import DATA, TinySettings, open_tiny_process

TOKENS = 32
SAMPLING = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": TOKENS}
CELL = "a turn"
DIRECT, WHOLE, STREAMED = "servers.generate", "gateway", "gateway, streamed"
FRESH, REUSED = "aiohttp, a session a request", "aiohttp, one session"

# Sends the same request over and over on each of so many connections, first some to warm up. "turns" on standard output and
# a line on standard input stand between the two: what lies behind is measured.
CLIENT = r"""
import json, socket, sys, threading
host, port, path, key, warm, turns, at_once, body = sys.argv[1:]
data = body.encode()
head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
request = (head + f"content-length: {len(data)}\r\n\r\n").encode() + data
warmed, go = threading.Barrier(int(at_once) + 1), threading.Event()

def ask(connection, file):
    connection.sendall(request)
    status, length = file.readline(), None
    assert b" 200" in status, status
    while (line := file.readline().strip()):
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    if length is not None:
        file.read(length)
        return
    while (size := int(file.readline(), 16)):
        file.read(size + 2)
    file.readline()

def client():
    with socket.create_connection((host, int(port))) as connection:
        file = connection.makefile("rb")
        for _ in range(int(warm) // int(at_once)):
            ask(connection, file)
        warmed.wait()
        go.wait()
        for _ in range(int(turns) // int(at_once)):
            ask(connection, file)

threads = [threading.Thread(target=client) for _ in range(int(at_once))]
[thread.start() for thread in threads]
warmed.wait()
print("turns", flush=True)
sys.stdin.readline()
go.set()
[thread.join() for thread in threads]
"""

PEER = r"""
import sys, aiohttp
from aiohttp import web
from trio_rollout.tokenizer import load_tokenizer
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

web.run_app(app, host="127.0.0.1", port=int(sys.argv[4]), print=lambda _text: print("ready", flush=True))
"""


class Alone:
    """A rollout that only samples."""

    index = 0

    def __init__(self, generate: Callable[..., Awaitable[object]]) -> None:
        self._generate = generate

    async def generate(
        self, input_ids: object, sampling: object = None, *, extra: object = None, on_tokens: object = None
    ) -> object:
        """Sample one turn."""
        del extra
        return await self._generate(input_ids, sampling, on_tokens=on_tokens)


@attrs.frozen
class Load:
    """The number of turns, of turns at once, and of warm-up turns that are not counted."""

    turns: int
    at_once: int
    warm: int


def own_seconds() -> float:
    """Processor time of this process."""
    return time.process_time()


def seconds_of(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_for_word(process: trio.Process, word: bytes) -> None:
    """Wait until a process has said this."""
    said = b""
    if process.stdout is None:
        raise AssertionError("it is a pipe")
    async for data in process.stdout:
        said += data
        if word in said:
            return
    raise RuntimeError(f"a process ended before it was {word.decode()}: {said[-200:]!r}")


async def cost_of_turns(
    url: str, path: str, key: str, load: Load, body: dict[str, Any], used: Callable[[], float]
) -> float:
    """Have another process send the turns; processor seconds that each of them took."""
    host, port = url.removeprefix("http://").split(":")
    counts = [str(load.warm), str(load.turns), str(load.at_once)]
    command = [sys.executable, "-c", CLIENT, host, port, path, key, *counts, json.dumps(body)]
    async with trio.open_nursery() as nursery:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        clients: trio.Process = await nursery.start(partial(trio.run_process, command, **pipes))  # type: ignore[arg-type]
        if clients.stdin is None:
            raise AssertionError("it is a pipe")
        await wait_for_word(clients, b"turns")
        before = used()
        await clients.stdin.send_all(b"\n")
        await clients.wait()
        return (used() - before) / load.turns


async def direct(server: str, load: Load) -> float:
    """``servers.generate`` alone, from the same ids each time."""
    async with open_sglang_servers([server]) as servers:
        ids = list(range(300))

        async def clients(turns: int) -> None:
            async def client() -> None:
                for _ in range(turns // load.at_once):
                    await servers.generate(ids, SAMPLING)

            async with trio.open_nursery() as nursery:
                for _ in range(load.at_once):
                    nursery.start_soon(client)

        await clients(load.warm)
        before = own_seconds()
        await clients(load.turns)
        return (own_seconds() - before) / load.turns


async def through_gateway(server: str, load: Load, *, stream: bool) -> float:
    """The gateway: HTTP in, chat template, tokens, the same call, the record, HTTP out."""
    settings = GatewaySettings(max_concurrent_turns=load.at_once)
    async with (
        open_sglang_servers([server]) as servers,
        open_gateway(servers, tokenizer=DATA, settings=settings) as gateway,
        gateway.open_session(Alone(servers.generate), prompt=Prompt(id="p", text="x"), sampling=SAMPLING) as session,  # type: ignore[arg-type]
    ):
        path = session.base_url.removeprefix(gateway.url) + "/chat/completions"
        return await cost_of_turns(gateway.url, path, session.api_key, load, {**BODY, "stream": stream}, own_seconds)


@asynccontextmanager
async def open_peer(server: str, python: str, *, reuse: bool) -> AsyncGenerator[tuple[str, int]]:
    """A gateway on aiohttp in a separate process; yields its URL and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-c", PEER, server, str(DATA), "reuse" if reuse else "fresh", str(port)]
    async with trio.open_nursery() as nursery:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "check": False}
        peer: trio.Process = await nursery.start(partial(trio.run_process, command, **pipes))  # type: ignore[arg-type]
        await wait_for_word(peer, b"ready")
        try:
            yield f"http://127.0.0.1:{port}", peer.pid
        finally:
            nursery.cancel_scope.cancel()


async def through_peer(server: str, load: Load, python: str, *, reuse: bool) -> float:
    """A gateway as peers write it."""
    async with open_peer(server, python, reuse=reuse) as (url, pid):
        return await cost_of_turns(url, "/v1/chat/completions", "x", load, BODY, partial(seconds_of, pid))


async def measure(load: Load, rounds: int, python: str, say: Callable[[str], None]) -> list[Run]:
    """Every way in every round, each round beginning with another one."""
    runs: list[Run] = []
    async with open_tiny_process(TinySettings(max_running=max(64, load.at_once))) as tiny:
        ways: dict[str, Callable[[], Awaitable[float]]] = {
            DIRECT: partial(direct, tiny.url, load),
            WHOLE: partial(through_gateway, tiny.url, load, stream=False),
            STREAMED: partial(through_gateway, tiny.url, load, stream=True),
            FRESH: partial(through_peer, tiny.url, load, python, reuse=False),
            REUSED: partial(through_peer, tiny.url, load, python, reuse=True),
        }
        for number in range(rounds):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                run = Run(cell=CELL, arm=name, round=number, load=os.getloadavg()[0])
                try:
                    run = attrs.evolve(run, figures={"cpu_ms": await ways[name]() * 1e3})
                except* RuntimeError as errors:
                    run = attrs.evolve(run, failed=str(errors.exceptions[0]))
                say(f"round {number + 1}  {name}: {run.failed or run.figures}")
                runs.append(run)
    return runs


@click.command(help=__doc__)
@options
@click.option("--turns", type=int, default=None, help="Turns of each way (default 1000, quick 64).")
@click.option("--at-once", default=16, show_default=True)
@click.option("--peer-python", default=sys.executable, help="A Python with aiohttp and this package.")
def main(
    *, quick: bool, rounds: int | None, out: Path, quiet: bool, turns: int | None, at_once: int, peer_python: str
) -> None:
    """Measure and show."""
    began = header()
    began["versions"] |= {package: version(package) for package in ("hypercorn", "starlette", "h11")}
    load = Load(turns or (64 if quick else 1000), at_once, warm=4 * at_once)
    runs = trio.run(measure, load, rounds or (1 if quick else 5), peer_python, say_to_stderr(quiet=quiet))
    report = Report("sessions", "quick" if quick else "full", runs, began)
    arms = (DIRECT, WHOLE, STREAMED, FRESH, REUSED)
    found = {arm: median_of(figures_of(runs, CELL, arm, "cpu_ms")) for arm in arms}
    rows = [
        (arm, found[arm], *(ratio(runs, (CELL, arm), (CELL, other), "cpu_ms") for other in (DIRECT, FRESH, REUSED)))
        for arm in arms
    ]
    columns = ("way", "CPU ms a turn", "x servers.generate", "x aiohttp, fresh", "x aiohttp, one session")
    report.table(
        f"{load.turns} turns, {at_once} at once, {TOKENS} tokens: medians (smallest to largest)", columns, rows
    )
    report.finish(out, bars(found, label="CPU ms a turn"))


if __name__ == "__main__":
    main()
