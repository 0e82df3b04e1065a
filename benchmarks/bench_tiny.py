"""How many tokens a second the tiny server gives over HTTP: a bare client, plain answers with log-probs, temperature only.

Shown beside it: tokens per second of the server's own processor time, which a busy machine changes less.
"""

import argparse
import json
import time

import psutil
import trio
from rich.console import Console
from rich.table import Table

from trio_rollout.tiny import TinySettings, open_tiny_process


def http_request(tokens: int) -> bytes:
    """One ``/generate`` call, head and body."""
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    body = json.dumps({"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True}).encode()
    return b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def call(stream: trio.SocketStream, request: bytes) -> None:
    """One round trip; the answer is read to its end and not decoded."""
    await stream.send_all(request)
    received = b""
    while b"\r\n\r\n" not in received:
        received += await stream.receive_some(65536)
    head, rest = received.split(b"\r\n\r\n", 1)
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server answered {received[:300]!r}")
    missing = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) - len(rest)
    while missing:
        missing -= len(await stream.receive_some(65536))


async def measure(vocab: int, *, at_once: int, tokens: int, rounds: int) -> tuple[float, float]:
    """Tokens per second, and per second of the server's processor time."""
    request = http_request(tokens)
    async with open_tiny_process(TinySettings(vocab=vocab)) as process:
        host, port = process.url.removeprefix("http://").rsplit(":", 1)

        async def client(count: int) -> None:
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                for _ in range(count):
                    await call(stream, request)

        await client(1)
        server = psutil.Process(process.pid)
        cpu, began = sum(server.cpu_times()[:2]), time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(at_once):
                nursery.start_soon(client, rounds)
        total, elapsed = at_once * tokens * rounds, time.perf_counter() - began
        return total / elapsed, total / (sum(server.cpu_times()[:2]) - cpu)


async def main() -> None:
    """Measure each vocabulary, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    table = Table("vocabulary", "tokens/s", "tokens/s of server CPU")
    for vocab in options.vocab:
        speed, per_cpu = await measure(vocab, at_once=options.at_once, tokens=options.tokens, rounds=options.rounds)
        table.add_row(str(vocab), f"{speed:,.0f}", f"{per_cpu:,.0f}")
    Console().print(f"{options.at_once} requests at once, {options.tokens} tokens each", table)


if __name__ == "__main__":
    trio.run(main)
