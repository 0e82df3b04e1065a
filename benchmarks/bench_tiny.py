"""Tokens a second of the tiny server over HTTP: a bare client, plain answers with log-probs, temperature only.

Shown beside it: tokens per second of the server's own processor time, which a busy machine changes less.
"""

import json
import os
import time
from functools import partial
from pathlib import Path

import click
import psutil
import trio
from harness.report import Report, bars, header, options, say_to_stderr
from harness.rounds import Run, figures_of, median_of

from trio_rollout.tiny import TinySettings, open_tiny_process

ARM = "tiny server"


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


@click.command(help=__doc__)
@options
@click.option(
    "--vocab", type=int, multiple=True, default=(512, 1024), show_default=True, help="Sizes of the vocabulary."
)
@click.option("--at-once", type=int, default=32, show_default=True, help="Requests in flight.")
@click.option("--tokens", type=int, default=None, help="Tokens an answer (default 256, quick 64).")
@click.option("--calls", type=int, default=None, help="Calls on each connection (default 10, quick 1).")
def main(
    *,
    quick: bool,
    rounds: int | None,
    out: Path,
    quiet: bool,
    vocab: tuple[int, ...],
    at_once: int,
    tokens: int | None,
    calls: int | None,
) -> None:
    """Measure each vocabulary, and show."""
    began, say = header(), say_to_stderr(quiet=quiet)
    tokens, calls = tokens or (64 if quick else 256), calls or (1 if quick else 10)
    runs = []
    for number in range(rounds or (1 if quick else 3)):
        for size in vocab:
            measured = partial(measure, size, at_once=at_once, tokens=tokens, rounds=calls)
            speed, per_cpu = trio.run(measured)
            say(f"vocabulary {size}: {speed:,.0f} tokens/s")
            figures = {"tokens_s": speed, "tokens_cpu_s": per_cpu}
            runs.append(Run(cell=str(size), arm=ARM, round=number, load=os.getloadavg()[0], figures=figures))
    report = Report("tiny", "quick" if quick else "full", runs, began)
    found = {
        size: [median_of(figures_of(runs, str(size), ARM, name)) for name in ("tokens_s", "tokens_cpu_s")]
        for size in vocab
    }
    columns = ("vocabulary", "tokens/s", "tokens/s of server CPU")
    rows = [(size, *figures) for size, figures in found.items()]
    report.table(f"{at_once} requests at once, {tokens} tokens each", columns, rows)
    report.finish(
        out, bars({str(size): figures[0] for size, figures in found.items()}, label="tokens/s, by vocabulary")
    )


if __name__ == "__main__":
    main()
