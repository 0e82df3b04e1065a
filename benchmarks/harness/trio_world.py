"""Trio: the engine, its bare client, and its transport alone."""

import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import trio

from trio_rollout import (
    Deadlines,
    EngineSettings,
    IterableSource,
    PauseMode,
    Prompt,
    Retry,
    SamplingParams,
    Trajectory,
    open_ledger,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout._http import Pool, parse_url, post_head, post_request, socket_connector
from trio_rollout.abc import Rollout
from trio_rollout.errors import EndOfData, SandboxLost
from trio_rollout.sglang import ServerSettings
from trio_rollout.sglang._wire import decoding

from .bodies import VOCABULARY
from .jobs import Done, Hooks
from .spec import Spec, fixed_body, prompt_ids

SETTINGS = ServerSettings(vocab_size=VOCABULARY, max_idle=20_000)


def settings_of(spec: Spec) -> EngineSettings:
    """The engine's settings for this job."""
    return EngineSettings(
        samples_per_prompt=spec.per_group,
        max_running=spec.slots,
        deadlines=Deadlines(group=spec.group_s),
        retry=Retry(max_attempts=spec.attempts, backoff_base=spec.backoff_s, jitter=0.0),
        failure_budget=10_000,
    )


def prompts(spec: Spec) -> Iterator[Prompt]:
    """So many, or no end of them."""
    numbers = itertools.count() if spec.groups is None else iter(range(spec.groups))
    return (Prompt(id=str(number), input_ids=prompt_ids(number, spec.prompt)) for number in numbers)


class _Running:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def take(self, size: int) -> Sequence[Done]:
        """See ``Running``."""
        try:
            batch = await self._engine.next_batch(size)
        except EndOfData:
            return ()
        await batch.ack()
        return [
            Done(str(group.prompt.id), len(group.trajectories), [float(row.reward) for row in group.trajectories])
            for group in batch.groups
        ]

    def weight_update(self, version: int, mode: str) -> AbstractAsyncContextManager[object]:
        """See ``Running``."""
        window: AbstractAsyncContextManager[object] = self._engine.weight_update(version=version, mode=PauseMode(mode))
        return window

    def given_up(self) -> Sequence[str]:
        """See ``Running``."""
        return [str(report.id.prompt) for report in self._engine.quarantined()]


class TrioWorld:
    """See ``World``."""

    def run(self, main: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """See ``World``."""
        return trio.run(main, *args)

    async def sleep(self, seconds: float) -> None:
        """See ``World``."""
        await trio.sleep(seconds)

    async def together(self, functions: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """See ``World``."""
        async with trio.open_nursery() as nursery:
            for function in functions:
                nursery.start_soon(function)

    @asynccontextmanager
    async def engine(self, spec: Spec, hooks: Hooks) -> AsyncGenerator[_Running]:
        """See ``World``."""
        sampling = SamplingParams(max_new_tokens=spec.tokens)
        if not spec.native:
            decoding.cut = None

        async def one_turn(prompt: Prompt, rollout: Rollout) -> Trajectory:
            del prompt
            sent = time.monotonic()
            turn = await rollout.generate(rollout.input, sampling)
            hooks.answered(sent, turn.latency_s)
            return rollout.finish([turn])

        async def several(prompt: Prompt, rollout: Rollout) -> Trajectory:
            turns, lost_at = [], hooks.lost_at(prompt.id, rollout.index)
            for number in range(spec.turns):
                if number == lost_at:
                    raise SandboxLost("as scripted")
                sent = time.monotonic()
                turn = await rollout.generate(rollout.input, sampling)
                hooks.answered(sent, turn.latency_s)
                turns.append(turn)
            return rollout.finish(turns)

        generate = several if spec.loses or spec.turns > 1 else one_turn

        async def reward(trajectory: Trajectory) -> float:
            tokens = trajectory.segments[0].response_length
            return await hooks.reward(trajectory.prompt.id, trajectory.index, tokens)

        async with (
            open_sglang_servers([spec.url], settings=SETTINGS) as servers,
            open_ledger(spec.ledger) if spec.ledger else nullcontext() as ledger,
            open_rollout_engine(
                IterableSource(prompts(spec)),
                generate,
                servers=servers,
                reward=reward,
                ledger=ledger,
                settings=settings_of(spec),
            ) as engine,
        ):
            yield _Running(engine)

    @asynccontextmanager
    async def client(self, spec: Spec) -> AsyncGenerator[Callable[[int], Awaitable[float | None]]]:
        """See ``World``."""
        sampling = SamplingParams(max_new_tokens=spec.tokens)
        rest = prompt_ids(0, spec.prompt)

        async with open_sglang_servers([spec.url], settings=SETTINGS) as servers:

            async def call(number: int) -> float | None:
                rest[0] = number % 65_536
                return (await servers.generate(rest, sampling)).latency_s

            yield call

    @asynccontextmanager
    async def transport(self, spec: Spec) -> AsyncGenerator[Callable[[int], Awaitable[float | None]]]:
        """See ``World``."""
        address = parse_url(spec.url)
        pool = Pool(address, socket_connector(), max_idle=20_000, idle_s=600, connect_s=10)
        head, body = post_head(address, "/generate"), fixed_body(spec)

        async def call(_number: int) -> float | None:
            with pool.take_idle() or await pool.open() as exchange:  # as Generation does
                if not exchange.send_now(post_request(head, body)):
                    await exchange.send_rest()
                if (await exchange.receive()).status != 200:
                    raise AssertionError("the fake server refused a request")
            return None

        try:
            yield call
        finally:
            pool.close()
