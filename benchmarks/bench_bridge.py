"""What a call across the bridge costs, by backend: CPU of the whole process per call, one after the other and many at once.

Compare ratios, not absolutes: `python benchmarks/bench_bridge.py --calls 2000`.
"""

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from trio_rollout_compat import Bridge, open_bridge

AT_ONCE = 1000


async def nothing() -> None:
    """What is called."""


@asynccontextmanager
async def attached() -> AsyncGenerator[Bridge]:
    """A bridge to a loop that somebody else runs."""
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


async def one_by_one(call: Callable[[], Awaitable[None]], calls: int) -> None:
    """Sequential calls."""
    for _ in range(calls):
        await call()


async def at_once(call: Callable[[], Awaitable[None]], calls: int) -> None:
    """As many as ``AT_ONCE`` under way."""
    for _ in range(0, calls, AT_ONCE):
        async with trio.open_nursery() as nursery:
            for _ in range(min(AT_ONCE, calls)):
                nursery.start_soon(call)


async def cost(run: Callable[..., Awaitable[None]], call: Callable[[], Awaitable[None]], calls: int) -> float:
    """Median of three, in microseconds of CPU a call."""
    costs = []
    for _ in range(3):
        begun = time.process_time()
        await run(call, calls)
        costs.append((time.process_time() - begun) / calls * 1e6)
    return statistics.median(costs)


async def main(calls: int) -> None:
    """Print the table. In-loop is last: it changes asyncio for the rest of the process."""
    print(f"{'':12}{'sequential':>12}{'at once':>12}   us CPU a call")
    native = trio.lowlevel.checkpoint
    print(f"{'trio':12}{await cost(one_by_one, native, calls):12.0f}{await cost(at_once, native, calls):12.0f}")
    openers = {"attach": attached, "thread": lambda: open_bridge("thread"), "in-loop": lambda: open_bridge("in-loop")}
    for name, opened in openers.items():
        async with opened() as bridge:
            call = bridge.wrap(nothing)
            print(f"{name:12}{await cost(one_by_one, call, calls):12.0f}{await cost(at_once, call, calls):12.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    trio.run(main, parser.parse_args().calls)
