"""The engine against tiny servers that are killed and hang, with weight updates every 20 s: nothing lost, nothing left.

Real processes, real sockets, real time. ``python tests/soak/failing_servers.py --minutes 30``; it ends with status 1 if a
group was lost or came twice, a request was left running on a server, or memory was not flat.
"""

import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import click
import httpx
import trio

from trio_rollout import (
    Deadlines,
    EngineSettings,
    IterableSource,
    PauseMode,
    Prompt,
    Retry,
    RolloutEngine,
    SamplingParams,
    SingleTurn,
    Trajectory,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.errors import ServerError
from trio_rollout.observe import task_tree
from trio_rollout.sglang import ServerSettings
from trio_rollout.tiny import TinyProcess, TinySettings, open_tiny_process

TINY = TinySettings(step_delay=0.1, max_running=64)
SETTINGS = EngineSettings(
    samples_per_prompt=4,
    max_running=96,
    max_ready=16,
    deadlines=Deadlines(group=120, turn=60, no_progress=15, abort=3, control=10, drain=30),
    retry=Retry(max_attempts=1000, max_free=1000, backoff_base=0.1, backoff_max=2.0),
    failure_budget=1000,
)
BATCH = 8
STALL_S = 180.0
"""Longest time without a batch: every outage and every deadline is far below it."""
IDLE_WITHIN_S = 15.0


@attrs.define(eq=False)
class Host:
    """A place where one server runs, most of the time."""

    port: int
    process: TinyProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def keep_serving(self, draw: random.Random, *, task_status: trio.TaskStatus[None]) -> None:
        """Run a server; when it dies, start another after an outage. It comes back with the weights of the start."""
        first = True
        while True:
            async with open_tiny_process(TINY, port=self.port) as self.process:
                if first:
                    task_status.started()
                first = False
                await self.process.wait()
            self.process = None
            await trio.sleep(draw.uniform(0.5, 10))


@attrs.define
class Tally:
    """The counts of a run."""

    counts: Counter[str] = attrs.field(factory=Counter)
    delivered: list[str] = attrs.field(factory=list)
    resident_mb: list[float] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)


def free_ports(count: int) -> list[int]:
    """Return different ports without a listener."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in taken]
    for listener in taken:
        listener.close()
    return ports


def resident_mb() -> float:
    """Resident size of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def length(trajectory: Trajectory) -> float:
    """A reward that takes no time."""
    await trio.lowlevel.checkpoint()
    return float(sum(segment.response_length for segment in trajectory.segments))


@contextmanager
def stopped(process: TinyProcess) -> Generator[None]:
    """The process hangs: its sockets stay open, nothing answers."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGCONT)


async def trouble(hosts: Sequence[Host], draw: random.Random, tally: Tally) -> None:
    """Kill or stop one server after another; at most one at a time hangs, any number may be dead."""
    while True:
        await trio.sleep(draw.uniform(3, 20))
        process = draw.choice(hosts).process
        if process is None:
            tally.counts["trouble on a dead server"] += 1
        elif draw.random() < 0.5:
            tally.counts["kill"] += 1
            process.kill()
        else:
            tally.counts["hang"] += 1
            with stopped(process):
                await trio.sleep(draw.uniform(1, 25))


async def running_on(client: httpx.AsyncClient, host: Host) -> int | None:
    """Return the number of requests that the server runs or has waiting; None if it does not answer."""
    try:
        loads = (await client.get(f"{host.url}/v1/loads")).json()["loads"]
    except (httpx.HTTPError, ValueError):
        return None
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def one_update(
    engine: RolloutEngine, hosts: Sequence[Host], mode: PauseMode, client: httpx.AsyncClient, tally: Tally
) -> None:
    """One window. In ABORT mode nothing may run on any server while it is open."""
    version = engine.weight_version + 1
    async with engine.weight_update(version=version, mode=mode):
        for host in hosts:
            body = {"new_version": str(version), "abort_all_requests": False}
            try:
                await client.post(f"{host.url}/update_weight_version", json=body)
            except httpx.HTTPError:
                tally.counts["server away in a window"] += 1
                continue
            if mode is PauseMode.ABORT and (left := await running_on(client, host)):
                tally.wrong.append(f"{left} requests run on {host.url} in the window to version {version}")


async def update_weights(
    engine: RolloutEngine, hosts: Sequence[Host], draw: random.Random, every: float, tally: Tally
) -> None:
    """Windows, in a drawn mode each, again at once where one failed because a server died in it."""
    async with httpx.AsyncClient(timeout=5) as client:
        while True:
            mode = draw.choice(list(PauseMode))
            try:
                await one_update(engine, hosts, mode, client, tally)
                tally.counts[f"weight update {mode.name}"] += 1
                await trio.sleep(every)
            except ServerError:
                tally.counts["weight update failed"] += 1
                await trio.sleep(1)


async def watch_memory(tally: Tally) -> None:
    """A sample each second."""
    while True:
        tally.resident_mb.append(resident_mb())
        await trio.sleep(1)


async def consume(engine: RolloutEngine, draw: random.Random, tally: Tally) -> None:
    """Take and ack batches until the engine is drained; now and then a slow step."""
    batches = engine.batches(BATCH)
    while True:
        with trio.move_on_after(STALL_S) as patience:
            async for batch in batches:
                tally.delivered += [group.prompt.id for group in batch.groups]
                await batch.ack()
                if draw.random() < 0.02:
                    tally.counts["slow consumer"] += 1
                    await trio.sleep(draw.uniform(0, 5))
                patience.deadline = trio.current_time() + STALL_S
        if not patience.cancelled_caught:
            return
        tally.wrong.append(f"no batch for {STALL_S} s: {engine.statistics()}\n{task_tree()}")


def judge(tally: Tally, engine: RolloutEngine, returned: Sequence[str]) -> None:
    """Each prompt that was pulled ended once, in one place."""
    twice = [name for name, times in Counter([*tally.delivered, *returned]).items() if times > 1]
    now = engine.statistics()
    if twice:
        tally.wrong.append(f"came twice: {twice[:10]}")
    if now.quarantined:
        tally.wrong.append(f"quarantined: {engine.quarantined()}")
    if len(tally.delivered) + len(returned) != now.pulled:
        tally.wrong.append(f"lost: {now.pulled} pulled, {len(tally.delivered)} delivered, {len(returned)} returned")
    fifth, end = tally.resident_mb[len(tally.resident_mb) // 5], tally.resident_mb[-1]
    if end > fifth + max(20.0, 0.05 * fifth):
        tally.wrong.append(f"memory not flat: {fifth:.0f} MB after a fifth of the run, {end:.0f} MB at its end")


async def require_idle(hosts: Sequence[Host], tally: Tally) -> None:
    """Nothing of the engine's runs on any server any more."""
    async with httpx.AsyncClient(timeout=5) as client:
        for host in hosts:
            left: int | None = None
            with trio.move_on_after(IDLE_WITHIN_S):
                while (left := await running_on(client, host)) != 0:
                    await trio.sleep(0.2)
            if left != 0:
                tally.wrong.append(f"{host.url}: {left} requests run {IDLE_WITHIN_S} s after the engine was left")


class Endless(IterableSource):
    """Prompts without end; ``returned`` are those that came back."""

    def __init__(self) -> None:
        super().__init__(Prompt(id=f"p{number}", input_ids=(1, 2, 3 + number % 100)) for number in range(10**9))
        self.returned: list[str] = []

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        self.returned += [prompt.id for prompt in prompts]
        await super().give_back(prompts)


async def live(minutes: float, seed: int, servers: int, every: float) -> Tally:
    """The whole run."""
    draw, tally, source = random.Random(seed), Tally(), Endless()
    sampling = SamplingParams(max_new_tokens=64, temperature=1.0)
    hosts = [Host(port) for port in free_ports(servers)]
    async with trio.open_nursery() as serving:
        for host in hosts:
            await serving.start(host.keep_serving, draw)
        async with (
            open_sglang_servers([host.url for host in hosts], settings=ServerSettings(probe=1.0)) as client,
            open_rollout_engine(
                source, SingleTurn(sampling), servers=client, reward=length, settings=SETTINGS
            ) as engine,
            trio.open_nursery() as consuming,
        ):
            consuming.start_soon(consume, engine, draw, tally)
            async with trio.open_nursery() as disturbing:
                disturbing.start_soon(trouble, hosts, draw, tally)
                disturbing.start_soon(update_weights, engine, hosts, draw, every, tally)
                disturbing.start_soon(watch_memory, tally)
                await trio.sleep(60 * minutes)
                disturbing.cancel_scope.cancel()
            await engine.drain(grace=20)
        await require_idle(hosts, tally)
        serving.cancel_scope.cancel()
    tally.counts.update({f"tried again {cause.value}": count for cause, count in engine.statistics().retries.items()})
    tally.counts["tokens"] = engine.statistics().generated_tokens
    tally.counts["late"] = engine.statistics().late
    tally.counts["orphans by the engine's own count"] = engine.statistics().orphans
    judge(tally, engine, source.returned)
    return tally


@click.command()
@click.option("--minutes", type=click.FloatRange(0.05), default=30.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of troubles, modes and pauses.")
@click.option("--servers", type=click.IntRange(1), default=3, show_default=True)
@click.option("--update-every", type=click.FloatRange(0.5), default=20.0, show_default=True, help="Seconds.")
def main(minutes: float, seed: int, servers: int, update_every: float) -> None:
    """Drive the engine against servers that are killed and hang; fail if anything is lost, doubled or left."""
    started = time.monotonic()
    tally = trio.run(live, minutes, seed, servers, update_every)
    click.echo(f"{time.monotonic() - started:.0f} s, {len(tally.delivered)} groups delivered")
    for name, count in sorted(tally.counts.items()):
        click.echo(f"  {name}: {count}")
    memory = tally.resident_mb
    click.echo(
        f"  resident: {memory[len(memory) // 5]:.0f} MB after a fifth, {max(memory):.0f} at most, {memory[-1]:.0f} now"
    )
    click.echo("\n".join(tally.wrong) or "nothing lost, nothing twice, nothing left, memory flat")
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
