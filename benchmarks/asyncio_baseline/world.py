"""asyncio: the baseline's engine, its bare client, and its transport alone, on the stock loop or uvloop."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import attrs
import numpy as np
import uvloop
from harness.jobs import Done, Hooks
from harness.spec import Spec, fixed_body, prompt_ids

from .clients import AiohttpClient, Client, HttpxClient
from .codecs import JsonCodec, OurCodec
from .engine import Engine, EngineSettings, Rollout
from .values import EndOfData, Prompt, Sample


class _Running:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def take(self, size: int) -> Sequence[Done]:
        """See ``Running``."""
        try:
            batch = await self._engine.next_batch(size)
        except EndOfData:
            return ()
        return [
            Done(done.prompt.id, len(done.samples), [sample.reward or 0.0 for sample in done.samples]) for done in batch
        ]

    def weight_update(self, version: int, mode: str) -> AbstractAsyncContextManager[object]:
        """See ``Running``. The baseline asks no server for its version."""
        del version
        return self._engine.weight_update(mode)

    def given_up(self) -> Sequence[str]:
        """See ``Running``."""
        return self._engine.counts.given_up


@attrs.frozen(kw_only=True)
class AsyncioWorld:
    """See ``World``."""

    client_name: str = "aiohttp"
    our_decoder: bool = False
    fast_loop: bool = False

    def run(self, main: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """See ``World``."""
        run: Any = uvloop.run if self.fast_loop else asyncio.run
        return run(main(*args))

    async def sleep(self, seconds: float) -> None:
        """See ``World``."""
        await asyncio.sleep(seconds)

    async def together(self, functions: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """See ``World``."""
        async with asyncio.TaskGroup() as group:
            for function in functions:
                group.create_task(function())  # type: ignore[arg-type]

    def _new_client(self, spec: Spec) -> Client:
        codec = OurCodec(spec.tokens) if self.our_decoder else JsonCodec(spec.tokens)
        if self.client_name == "httpx":
            return HttpxClient(spec.url, codec, slots=spec.slots)
        return AiohttpClient(spec.url, codec)

    def _prompt(self, number: int, spec: Spec) -> Prompt:
        ids: Any = prompt_ids(number, spec.prompt)
        if self.our_decoder:
            ids = np.array(ids, np.int32)
            ids.flags.writeable = False
        return Prompt(str(number), ids)

    @asynccontextmanager
    async def engine(self, spec: Spec, hooks: Hooks) -> AsyncGenerator[_Running]:
        """See ``World``."""

        async def generate(prompt: Prompt, rollout: Rollout) -> Sample:
            lost_at = hooks.lost_at(prompt.id, rollout.index)
            for number in range(spec.turns):
                if number == lost_at:
                    raise RuntimeError("the sandbox is gone, as scripted")
                sent = time.monotonic()
                sample = await rollout.generate(prompt)
                hooks.answered(sent, sample.latency_s)
            sample.prompt_id, sample.index = prompt.id, rollout.index
            return sample

        async def reward(sample: Sample) -> float:
            return await hooks.reward(sample.prompt_id, sample.index, len(sample.output_ids))

        numbers: Iterator[int] = itertools.count() if spec.groups is None else iter(range(spec.groups))
        settings = EngineSettings(
            per_group=spec.per_group,
            slots=spec.slots,
            group_s=spec.group_s,
            attempts=spec.attempts,
            backoff_s=spec.backoff_s,
        )
        prompts = map(partial(self._prompt, spec=spec), numbers)
        async with self._new_client(spec) as client, Engine(prompts, generate, client, reward, settings) as engine:
            yield _Running(engine)

    @asynccontextmanager
    async def client(self, spec: Spec) -> AsyncGenerator[Callable[[int], Awaitable[float | None]]]:
        """See ``World``."""
        prompt = self._prompt(0, spec)
        async with self._new_client(spec) as client:

            async def call(number: int) -> float | None:
                if not self.our_decoder:
                    prompt.input_ids[0] = number % 65_536  # type: ignore[index]
                return (await client.generate(prompt)).latency_s

            yield call

    @asynccontextmanager
    async def transport(self, spec: Spec) -> AsyncGenerator[Callable[[int], Awaitable[float | None]]]:
        """See ``World``."""
        body, url = fixed_body(spec), f"{spec.url}/generate"
        headers = {"Content-Type": "application/json"}
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
                )
            )

            async def call(_number: int) -> float | None:
                async with session.post(url, data=body, headers=headers) as response:
                    response.raise_for_status()
                    await response.read()
                return None

            yield call
