"""The cost of a call across the bridge, by backend: an empty call, and a rollout through an asyncio client against the native one.

CPU of the whole process per call. The rollout is one /generate answer of 16 tokens through the baseline's aiohttp client, 64 at
once; native is ``servers.generate``. In-loop comes last: it changes asyncio for the rest of the process.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import click
import trio
from asyncio_baseline import AiohttpClient, JsonCodec, Prompt
from harness.fake import FakeServer, Latency, fake_server
from harness.report import Report, bars, header, options
from harness.rounds import Median, median_of
from harness.spec import Spec, prompt_ids
from harness.trio_world import TrioWorld

from trio_rollout_compat import Bridge, open_bridge

AT_ONCE = 1000
ROLLOUTS_AT_ONCE = 64
TOKENS = 16
Call = Callable[[], Awaitable[object]]


async def nothing() -> None:
    """The function that is called."""


@asynccontextmanager
async def attached() -> AsyncGenerator[Bridge]:
    """A bridge to a loop that another thread runs."""
    loop = asyncio.SelectorEventLoop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        async with open_bridge(loop=loop) as bridge:
            yield bridge
    finally:
        loop.call_soon_threadsafe(loop.stop)
        await trio.to_thread.run_sync(thread.join)
        loop.close()


async def run_calls(call: Call, calls: int, at_once: int) -> None:
    """So many calls, so many at once."""
    left = calls

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await call()

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(worker)


async def cost(call: Call, calls: int, at_once: int) -> Median | None:
    """Median of three, in microseconds of CPU a call."""
    costs = []
    for _ in range(3):
        begun = time.process_time()
        await run_calls(call, calls, at_once)
        costs.append((time.process_time() - begun) / calls * 1e6)
    return Median(statistics.median(costs), min(costs), max(costs), len(costs)) if costs else median_of([])


async def native(server: FakeServer, calls: int) -> list[Median | None]:
    """A checkpoint, and ``servers.generate``."""
    spec = Spec(url=server.url, slots=ROLLOUTS_AT_ONCE, tokens=TOKENS)
    async with TrioWorld().client(spec) as generate:
        rollout = await cost(lambda: generate(1), calls, ROLLOUTS_AT_ONCE)
    empty = trio.lowlevel.checkpoint
    return [await cost(empty, calls, 1), await cost(empty, calls, AT_ONCE), rollout]


async def bridged(bridge: Bridge, server: FakeServer, calls: int) -> list[Median | None]:
    """The same calls over one backend."""
    empty = bridge.wrap(nothing)
    found = [await cost(empty, calls, 1), await cost(empty, calls, AT_ONCE)]
    prompt = Prompt("1", prompt_ids(1, 512))
    stack = AsyncExitStack()
    clients: list[AiohttpClient] = []

    async def open_client() -> None:
        clients.append(await stack.enter_async_context(AiohttpClient(server.url, JsonCodec(TOKENS))))

    async def sample() -> None:
        await clients[0].generate(prompt)

    await bridge.wrap(open_client)()
    found.append(await cost(bridge.wrap(sample), calls, ROLLOUTS_AT_ONCE))
    await bridge.wrap(stack.aclose)()
    return found


async def measure(server: FakeServer, calls: int) -> dict[str, list[Median | None]]:
    """Every backend."""
    found = {"trio": await native(server, calls)}
    openers = {"attach": attached, "thread": lambda: open_bridge("thread"), "in-loop": lambda: open_bridge("in-loop")}
    for name, opened in openers.items():
        async with opened() as bridge:
            found[name] = await bridged(bridge, server, calls)
    return found


@click.command(help=__doc__)
@options
@click.option("--calls", type=int, default=None, help="Calls of each kind (default 2000, quick 200).")
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool, calls: int | None) -> None:
    """Measure and show."""
    del rounds, quiet
    began = header()
    with fake_server() as server:
        server.configure(Latency(median=20))
        found = trio.run(measure, server, calls or (200 if quick else 2000))
    report = Report("bridge", "quick" if quick else "full", [], began)
    columns = ("backend", "empty, one by one", f"empty, {AT_ONCE} at once", f"a rollout, {ROLLOUTS_AT_ONCE} at once")
    report.table("us of CPU a call", columns, [(name, *figures) for name, figures in found.items()])
    report.finish(out, bars({name: figures[2] for name, figures in found.items()}, label="us of CPU a rollout"))


if __name__ == "__main__":
    main()
