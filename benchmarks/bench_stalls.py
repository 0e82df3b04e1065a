"""Do large answers stall the loop for others? A task that wants to run every millisecond, beside answers being decoded.

Each answer is decoded on the loop, in a worker thread, and by the client itself as it comes from a server, which takes the
thread above a size. Excess is how much later than its millisecond the ticker ran.
"""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import trio
from harness.answer import answer_of, asked_for
from harness.fake import FakeServer, Latency, fake_server
from harness.meter import quantile
from harness.report import Report, bars, header, options
from harness.rounds import Median, median_of
from harness.trio_world import SETTINGS

from trio_rollout import SamplingParams, open_sglang_servers
from trio_rollout.sglang import SGLangServers
from trio_rollout.sglang._wire import decode_turn

TICK_S = 0.001
BETWEEN_S = 0.02


async def excess(decode: Callable[[], Awaitable[object]], answers: int) -> list[float]:
    """The ticker's excess, in ms, while so many answers are decoded one after the other."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.monotonic() + TICK_S
            await trio.sleep(TICK_S)
            late.append((time.monotonic() - due) * 1e3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        for _ in range(answers):
            await trio.sleep(BETWEEN_S)
            await decode()
        nursery.cancel_scope.cancel()
    return late


async def measure(server: FakeServer, tokens: int, answers: int, rounds: int) -> dict[str, list[Median | None]]:
    """p50, p99 and the most, over some rounds, for nothing, the loop, a thread, and the client."""
    async with open_sglang_servers([server.url], settings=SETTINGS) as servers:
        return await _measured(servers, tokens, answers, rounds)


async def _measured(servers: SGLangServers, tokens: int, answers: int, rounds: int) -> dict[str, list[Median | None]]:
    body, asked = answer_of(tokens), asked_for(tokens)

    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    async def inline() -> None:
        decode_turn(body, asked)
        await trio.lowlevel.checkpoint()

    async def in_thread() -> None:
        await trio.to_thread.run_sync(decode_turn, body, asked)

    async def by_the_client() -> None:
        await servers.generate([1, 2, 3], SamplingParams(max_new_tokens=tokens))

    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "nothing": nothing,
        "on the loop": inline,
        "in a thread": in_thread,
        "by the client": by_the_client,
    }
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(await excess(way, answers))
    return {
        name: [median_of([quantile(late, share) for late in each]) for share in (0.5, 0.99, 1.0)]
        for name, each in found.items()
    }


@click.command(help=__doc__)
@options
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool) -> None:
    """Measure and show."""
    del quiet
    report = Report("stalls", "quick" if quick else "full", [], header())
    values: dict[str, Median | None] = {}
    with fake_server() as server:
        server.configure(Latency())
        for tokens in (8192, 32_768):
            found = trio.run(measure, server, tokens, 10 if quick else 40, rounds or (1 if quick else 3))
            rows = [(name, *figures) for name, figures in found.items()]
            report.table(f"{tokens} tokens: the ticker's excess, ms", ("decoding", "p50", "p99", "most"), rows)
            values |= {f"{tokens}, {name}": figures[1] for name, figures in found.items()}
    report.finish(out, bars(values, label="p99 excess of a 1 ms ticker, ms"))


if __name__ == "__main__":
    main()
