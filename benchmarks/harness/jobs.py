"""The work of an arm, written once: ``world`` hides whether Trio or asyncio runs it.

Every job returns plain figures. Coroutines here await nothing but what the world gives them.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, Protocol

import attrs

from .fake import FakeServer
from .meter import Meter, cpu_seconds, resident_bytes
from .spec import Spec

_LOOK_S = 0.02


@attrs.frozen
class Done:
    """A delivered group: its prompt's id, how many rollouts it has, their rewards."""

    id: str
    rollouts: int
    rewards: Sequence[float]


class Hooks:
    """The job's view of the rollouts. The same callbacks serve every engine."""

    def __init__(self, spec: Spec, answered: Callable[[float, float | None], None]) -> None:
        self._spec = spec
        self.answered = answered
        self._failed: set[tuple[str, int]] = set()
        self._tries: Counter[tuple[str, int]] = Counter()
        self._asked: Counter[str] = Counter()

    def lost_at(self, prompt: str, index: int) -> int | None:
        """The turn before which this try at the sample loses its sandbox; None if it keeps it. Every engine meets the same ones."""
        if not self._spec.loses:
            return None
        self._tries[prompt, index] += 1
        rng = random.Random(f"{prompt} {index} {self._tries[prompt, index]}")
        return rng.randrange(self._spec.turns) if rng.random() < self._spec.loses else None

    async def reward(self, prompt: str, index: int, tokens: int) -> float:
        """The answer's length. A scripted failure is raised by every try of the scorer in the first attempt."""
        mod, tries = self._spec.reward_fails_mod, self._spec.attempts
        if mod and int(prompt) % mod == 3 and index == 0:
            for number in range(tries):
                if (prompt, number) not in self._failed:
                    self._failed.add((prompt, number))
                    raise ValueError("as scripted")
        if index == 0 and int(prompt) % 4 == 3:
            self._asked[prompt] += 1
            if self._asked[prompt] <= self._spec.judge_fails:
                raise ConnectionError("the judge is down, as scripted")
            if self._asked[prompt] <= self._spec.reward_exits:
                raise SystemExit
        return float(tokens)


class Running(Protocol):
    """An engine at work."""

    async def take(self, size: int) -> Sequence[Done]:
        """The next groups; empty at the end of the data."""
        ...

    def weight_update(self, version: int, mode: str) -> AbstractAsyncContextManager[object]:
        """A window in which weights change."""
        ...

    def given_up(self) -> Sequence[str]:
        """Prompts that failed for good."""
        ...


class World(Protocol):
    """Trio or asyncio, with an engine and its bare client."""

    def run(self, main: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a coroutine function in a new loop."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    async def together(self, functions: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Run these at once."""
        ...

    def engine(self, spec: Spec, hooks: Hooks) -> AbstractAsyncContextManager[Running]:
        """The engine on this job."""
        ...

    def client(self, spec: Spec) -> AbstractAsyncContextManager[Callable[[int], Awaitable[float | None]]]:
        """The bare client: a function that samples one answer to a prompt of this number, and says what it took there."""
        ...

    def transport(self, spec: Spec) -> AbstractAsyncContextManager[Callable[[int], Awaitable[float | None]]]:
        """Bytes out, bytes in."""
        ...


async def steady(world: World, spec: Spec) -> dict[str, Any]:
    """The whole engine in its stride: CPU per rollout, throughput, excess latency."""
    meter = Meter(spec)
    async with world.engine(spec, Hooks(spec, meter.answered)) as engine:
        while not meter.over:
            await engine.take(spec.batch)
        leave(meter.result)


async def bare(world: World, spec: Spec) -> dict[str, Any]:
    """The bare client, as many workers as slots."""
    async with world.client(spec) as call:
        await _workers(world, spec, call)
    raise AssertionError("a worker ends the process")


async def bytes_only(world: World, spec: Spec) -> dict[str, Any]:
    """The transport alone, as many workers as slots."""
    async with world.transport(spec) as call:
        await _workers(world, spec, call)
    raise AssertionError("a worker ends the process")


async def _workers(world: World, spec: Spec, call: Callable[[int], Awaitable[float | None]]) -> None:
    meter = Meter(spec)

    async def worker(first: int) -> None:
        number = first
        while not meter.over:
            sent = time.monotonic()
            meter.answered(sent, await call(number))
            number += spec.slots
        leave(meter.result)

    await world.together([lambda first=first: worker(first) for first in range(spec.slots)])  # type: ignore[misc]


def leave(result: dict[str, Any]) -> NoReturn:
    """Say what was measured and end the process: what thousands of cancellations cost is another benchmark's question."""
    print(json.dumps(result), flush=True)
    os._exit(0)


async def finite(world: World, spec: Spec) -> dict[str, Any]:
    """So many groups to their end, or until the time is up: what came when, and what never did."""
    server, cpu, begun = FakeServer(spec.port), cpu_seconds(), time.monotonic()
    came: list[tuple[float, str]] = []
    seen: Counter[str] = Counter()
    wrong = 0
    ended = False
    answers = 0

    def answered(_sent: float, _took: float | None) -> None:
        nonlocal answers
        answers += 1

    async with world.engine(spec, Hooks(spec, answered)) as engine:

        async def consume() -> None:
            nonlocal wrong, ended
            while time.monotonic() - begun < spec.limit:
                batch = await engine.take(1)
                if not batch:
                    ended = True
                    break
                came.extend((time.monotonic() - begun, done.id) for done in batch)
                seen.update(done.id for done in batch)
                wrong += sum(len(done.rewards) != spec.per_group for done in batch)
            running.clear()

        async def watch() -> None:
            while running and time.monotonic() - begun < spec.limit:
                await world.sleep(_LOOK_S)
            if running:
                leave(report())

        running = [True]

        def report() -> dict[str, Any]:
            return {
                "wall": time.monotonic() - begun,
                "cpu_us": (cpu_seconds() - cpu) / max(1, answers) * 1e6,
                "groups": len(came),
                "duplicates": sum(count - 1 for count in seen.values()),
                "lost": (spec.groups or 0) - len(seen) - len(engine.given_up()),
                "given_up": len(engine.given_up()),
                "wrong": wrong,
                "ended": ended,
                "came": came,
                **{f"server_{name}": value for name, value in server.stats().items()},
            }

        await world.together([consume, watch])
        return report()


async def cancelled(world: World, spec: Spec) -> dict[str, Any]:
    """Fill all slots, then leave: time until the client is quiet."""
    server = FakeServer(spec.port)
    empty = resident_bytes()
    async with world.engine(spec, Hooks(spec, lambda _sent, _took: None)):
        while server.stats()["running"] < spec.slots:
            await world.sleep(_LOOK_S)
        full = resident_bytes()
        cpu, begun = cpu_seconds(), time.monotonic()
    wall = time.monotonic() - begun
    return {
        "wall": wall,
        "cpu": cpu_seconds() - cpu,
        "cpu_us": (cpu_seconds() - cpu) / spec.slots * 1e6,
        "kb_per_rollout": (full - empty) / spec.slots / 1e3,
        "left_at": begun,
        "server_running": server.stats()["running"],
    }


async def updated(world: World, spec: Spec) -> dict[str, Any]:
    """Fill all slots, change weights: from the start to an idle server, from the end to full load."""
    server = FakeServer(spec.port)
    async with world.engine(spec, Hooks(spec, lambda _sent, _took: None)) as engine:

        async def trainer() -> None:
            while server.stats()["running"] < spec.slots:
                await world.sleep(_LOOK_S)
            server.mark(spec.slots)
            begun = time.monotonic()
            async with engine.weight_update(1, spec.mode):
                paused = time.monotonic()
                found = server.stats()
                idle = found["idle_at"] - begun if not found["running"] else 0.0
                server.ask("POST", "/weights?version=1")
                server.mark(spec.slots)
                ended = time.monotonic()
            entered = time.monotonic() - ended
            while not (full := server.stats()["full_at"]):
                await world.sleep(_LOOK_S / 4)
            leave({
                "enter_ms": (paused - begun) * 1e3,
                "idle_ms": idle * 1e3,
                "leave_ms": entered * 1e3,
                "full_ms": max(0.0, full - ended) * 1e3,
            })

        async def consume() -> None:
            while await engine.take(spec.batch):
                pass

        await world.together([trainer, consume])
    raise AssertionError("the trainer ends the process")


JOBS: dict[str, Callable[[World, Spec], Awaitable[dict[str, Any]]]] = {
    "steady": steady,
    "bare": bare,
    "bytes": bytes_only,
    "finite": finite,
    "cancelled": cancelled,
    "updated": updated,
}
