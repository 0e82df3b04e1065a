"""A connection to a server that always has more to send, and a client of such a server beside a good one."""

import itertools
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager

import attrs
import trio
from trio.testing import MockClock

from trio_rollout.sglang import ServerSettings, SGLangServers, open_sglang_servers
from trio_rollout.testing import FakeSGLang, open_sim_net

from .helpers import PROMPT_LINK

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STALLED = 64 << 20
"""Bytes that are given out without a checkpoint before a test gives up: the loop stands still."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int) -> bytes:
    """One event with the first tokens of an answer, as far as they are ever to be had."""
    meta = b'{"output_token_logprobs":[[-1.0,7,null]],"completion_tokens":%d,"finish_reason":null}' % number
    return chunk(b'data: {"output_ids":[7],"meta_info":%b}\n\n' % meta)


ENDLESS: dict[str, tuple[bytes, Callable[[int], bytes]]] = {
    "heads with status 103": (b"", lambda _: b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50),
    "heads with status 100 and headers": (b"", lambda _: b"HTTP/1.1 100 Continue\r\nlink: x\r\n\r\n"),
    "empty lines": (b"", lambda _: b"\r\n\r\n" * 500),
    "a status line": (b"HTTP/1.1 200 O", lambda _: b"K" * 2000),
    "one header": (OK + b"x: ", lambda _: b"yy" * 1000),
    "headers": (OK, lambda number: b"x%d: y\r\n" % number),
    "folded headers": (OK + b"x: y\r\n", lambda _: b" y\r\n" * 500),
    "a chunked body": (CHUNKED, lambda _: b"1\r\nx\r\n" * 500),
    "large chunks": (CHUNKED, lambda _: chunk(b"x" * 9000)),
    "one chunk": (CHUNKED + b"fffffffffff\r\n", lambda _: b"x" * 2000),
    "a chunk's size": (CHUNKED, lambda _: b"0" * 2000),
    "a chunk's extension": (CHUNKED + b"1;", lambda _: b"name=value;" * 200),
    "chunks with extensions": (CHUNKED, lambda _: b"1;" + b"n" * 200 + b"\r\nx\r\n"),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", lambda number: b"t%d: y\r\n" % number),
    "a body until the end": (OK + b"\r\n", lambda _: b"xx" * 1000),
    "an announced body": (OK + b"content-length: 1000000000000\r\n\r\n", lambda _: b"x" * 2000),
    "spaces": (CHUNKED + b"fffffffffff\r\n", lambda _: b" " * 2000),
    "comments": (EVENTS, lambda _: chunk(b": ping\n\n") * 200),
    "comments in large chunks": (EVENTS, lambda _: chunk(b": ping\n\n" * 1000)),
    "blank lines": (EVENTS, lambda _: chunk(b"\n" * 500)),
    "half a line": (EVENTS, lambda _: chunk(b"data: x" * 10)),
    "names of events": (EVENTS, lambda _: chunk(b"event: x\n") * 200),
    "events that are no JSON": (EVENTS, lambda _: chunk(b"data: {}\n\n") * 200),
    "events without tokens": (EVENTS, lambda _: chunk(b'data: {"meta_info":{}}\n\n') * 100),
    "the same event": (EVENTS, lambda _: event(1) * 20),
    "events that repeat": (EVENTS, lambda number: event(1).replace(b"null}", b'"x%08d"}' % number)),
    "events with new tokens": (EVENTS, lambda number: event(number + 1)),
    "refusals": (EVENTS, lambda _: chunk(b'data: {"error":{"message":"no"}}\n\n') * 50),
    "ends": (EVENTS, lambda _: chunk(b"data: [DONE]\n\n") * 100),
}
"""Answers without an end: their beginning, and the part that comes again and again, by its number."""


@attrs.define
class Flood:
    """A connection behind which a server sends without end. Each wait takes 5 ms of the clock."""

    clock: MockClock
    first: bytes
    more: Callable[[int], bytes]
    since_wait: int = 0
    most: int = 0
    """The most bytes that were taken between two checkpoints."""
    total: int = 0
    closed: bool = False
    _rest: bytes = b""
    _pieces: Iterator[bytes] | None = None

    def send_now(self, data):
        self._pieces = itertools.chain([self.first], map(self.more, itertools.count()))
        return len(data)

    def recv_into_now(self, buffer):
        if self._pieces is None:
            return None
        parts, size = [self._rest], len(self._rest)
        while size < len(buffer):
            parts.append(next(self._pieces))
            size += len(parts[-1])
        data = b"".join(parts)
        count = len(buffer)
        buffer[:count] = data[:count]
        self._rest = data[count:]
        self.since_wait += count
        self.total += count
        self.most = max(self.most, self.since_wait)
        if self.since_wait > STALLED:
            raise AssertionError(f"{self.since_wait} bytes were taken without a checkpoint")
        return count

    async def wait_readable(self):
        if self._pieces is None:
            await trio.sleep_forever()
        self.since_wait = 0
        self.clock.jump(0.005)
        await trio.lowlevel.checkpoint()

    async def wait_writable(self):
        await trio.lowlevel.checkpoint()

    def close(self):
        self.closed = True


@attrs.frozen
class FloodedWorld:
    """A client of one fake server, whose next connections for work can be floods."""

    fake: FakeSGLang
    servers: SGLangServers
    floods: list[Flood]
    switch: dict[str, tuple[bytes, Callable[[int], bytes]] | None]

    def flood(self, kind: str | None) -> None:
        """From now on every new connection is a flood of this kind; None: they are good again."""
        self.switch["kind"] = None if kind is None else ENDLESS[kind]


@asynccontextmanager
async def flooded_world(
    clock: MockClock,
    settings: ServerSettings = ServerSettings(vocab_size=1000),  # noqa: B008
) -> AsyncGenerator[FloodedWorld]:
    """A good server until ``flood`` is called; in virtual time."""
    fake, floods = FakeSGLang(url="http://fake:1"), []
    switch = {"kind": None}

    async with open_sim_net({fake.url: fake.serve}, rng=random.Random(0), link=PROMPT_LINK) as net:

        async def connect(address):
            if switch["kind"] is None:
                return await net.connect(address)
            floods.append(Flood(clock, *switch["kind"]))
            return floods[-1]

        async with open_sglang_servers([fake.url], settings=settings, connect=connect) as servers:
            yield FloodedWorld(fake, servers, floods, switch)
