"""Two server programs: one that answers requests with seeded bytes, endless and half ones, and a good one.

``python -m tests.soak.hostile_answers hostile SEED`` or ``good``: prints its URL, and serves until its standard input ends. They
are separate processes, so that a hostile server can send faster than the client parses.
"""

import gzip
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import trio

from tests.sglang.flood import CHUNKED, ENDLESS, EVENTS, OK, chunk, event
from trio_rollout.testing import open_fake_sglang

BLOCK = 65536
ANSWER = b'{"text":"six","output_ids":[6],"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":[[-1.0,6,null]]}}'
INFO = b'{"model_path":"hostile","is_generation":true,"weight_version":"default"}'


def head_with(length: object) -> bytes:
    return OK + b"content-length: %b\r\n\r\n" % str(length).encode()


PIECES: dict[str, Callable[[random.Random], bytes]] = {
    "noise": lambda rng: rng.randbytes(rng.randrange(1, 3000)),
    "status lines": lambda rng: b"HTTP/1.%d %d X\r\n" % (rng.randrange(3), rng.randrange(1200)),
    "1xx": lambda rng: b"HTTP/1.1 %d X\r\n\r\n" % rng.randrange(100, 200) * rng.randrange(1, 40),
    "headers": lambda rng: b"".join(b"x%d: %b\r\n" % (n, b"y" * rng.randrange(200)) for n in range(rng.randrange(300))),
    "lengths": lambda rng: head_with(rng.choice([0, 1, 7, -1, 10**9, 10**30, "0x10", "0" * 5000 + "1", "1, 1"])),
    "chunks": lambda rng: (
        CHUNKED + b"".join(chunk(rng.randbytes(rng.randrange(1, 50))) for _ in range(rng.randrange(50)))
    ),
    "chunk sizes": lambda rng: (
        CHUNKED + rng.choice([b"ffffffffffffffffff\r\n", b"-1\r\n", b"0" * 9000, b"zz\r\n", b"\r\n"])
    ),
    "extensions": lambda rng: CHUNKED + b"1" + b";a=b" * rng.randrange(5000) + b"\r\nx\r\n",
    "trailers": lambda rng: CHUNKED + b"0\r\n" + b"t: u\r\n" * rng.randrange(5000),
    "comments": lambda rng: EVENTS + chunk(b": ping\n\n") * rng.randrange(2000),
    "events": lambda rng: EVENTS + b"".join(event(n + 1) for n in range(rng.randrange(50))),
    "half a line": lambda rng: EVENTS + chunk(b'data: {"output_ids":[7,' * rng.randrange(1, 100)),
    "gzip": lambda rng: OK + b"content-encoding: gzip\r\n\r\n" + gzip.compress(ANSWER) * rng.randrange(1, 9),
    "half an answer": lambda rng: (head_with(len(ANSWER)) + ANSWER)[: rng.randrange(1, 150)],
    "two answers": lambda _: (head_with(len(ANSWER)) + ANSWER) * 2,
    "nested": lambda rng: head_with(40_000) + rng.choice([b"[", b'{"a":']) * 8000,
}


def blocks(rng: random.Random) -> Iterator[bytes]:
    """What is sent as one answer, in pieces; endless half of the time."""
    if rng.random() < 0.5:
        first, more = ENDLESS[rng.choice(list(ENDLESS))]
        yield first
        number = 0
        while True:
            parts, size = [], 0
            while size < BLOCK:
                parts.append(more(number))
                size += len(parts[-1])
                number += 1
            yield b"".join(parts)
    for _ in range(rng.randrange(1, 6)):
        piece = PIECES[rng.choice(list(PIECES))](rng)
        for at in sorted(rng.choices(range(len(piece) + 1), k=rng.randrange(4))):
            yield piece[:at]
            piece = piece[at:]
        yield piece


def answer(connection: socket.socket, rng: random.Random) -> None:
    """Answer the requests of one connection: questions properly most of the time, everything else with bytes."""
    with connection, suppress(OSError):
        while request := connection.recv(BLOCK):
            if b" /model_info " in request or b" /ready " in request or b" /server_info " in request:
                connection.sendall(head_with(len(INFO)) + INFO)
                continue
            if b" /v1/loads" in request and rng.random() < 0.5:
                connection.sendall(head_with(12) + b'{"loads":[]}')
                continue
            for block in blocks(rng):
                connection.sendall(block)
            end = rng.random()
            if end < 0.2:
                connection.recv(1)  # and nothing more is sent
            elif end < 0.4:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            elif end < 0.7:
                return


def accept(listener: socket.socket, seed: int) -> None:
    number = 0
    while True:
        connection, _ = listener.accept()
        number += 1
        threading.Thread(target=answer, args=(connection, random.Random(f"{seed} {number}")), daemon=True).start()


def serve_badly(seed: int) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        threading.Thread(target=accept, args=(listener, seed), daemon=True).start()
        sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()


async def serve_well() -> None:
    async with open_fake_sglang() as fake:
        sys.stdout.write(f"{fake.url}\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


if __name__ == "__main__":
    if sys.argv[1] == "hostile":
        serve_badly(int(sys.argv[2]))
    else:
        trio.run(serve_well)
