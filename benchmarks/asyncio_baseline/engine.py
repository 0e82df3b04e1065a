"""The engine: groups as tasks, settled by their done-callbacks."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from .clients import ABORT_S, Client
from .values import Aborted, EndOfData, Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Slots are counted in rollouts. Times are seconds; None: no limit."""

    per_group: int = 8
    slots: int = 256
    max_ready: int = 64
    group_s: float | None = 1800.0
    turn_s: float | None = 600.0
    reward_s: float | None = 300.0
    attempts: int = 3
    backoff_s: float = 0.5


@dataclass(slots=True)
class GroupResult:
    """The n samples of one prompt."""

    prompt: Prompt
    samples: Sequence[Sample]
    attempt: int


@dataclass(slots=True)
class _Job:
    """A prompt on its way. ``held``: slots that its rollouts have not given back."""

    prompt: Prompt
    attempts: int = 0
    tries: int = 0
    held: int = 0
    error: BaseException | None = None


@dataclass(slots=True)
class Rollout:
    """The handle that a generate function gets."""

    engine: "Engine"
    index: int

    async def generate(self, prompt: Prompt) -> Sample:
        """One answer, within the turn's time; waits while weights change."""
        engine = self.engine
        await engine.gate.wait()
        engine.calls += 1
        try:
            async with asyncio.timeout(engine.settings.turn_s):
                return await engine.client.generate(prompt)
        finally:
            engine.calls -= 1
            engine.quiet.set()


Generate = Callable[[Prompt, Rollout], Awaitable[Sample]]
Reward = Callable[[Sample], Awaitable[float]]


@dataclass(slots=True)
class Counts:
    """Groups, since the start."""

    delivered: int = 0
    requeued: int = 0
    given_up: list[str] = field(default_factory=list)


class Engine:
    """Run groups while slots are free. ``async with`` it; leaving cancels what runs and aborts it on the server."""

    def __init__(
        self, prompts: Iterable[Prompt], generate: Generate, client: Client, reward: Reward, settings: EngineSettings
    ) -> None:
        self.client = client
        self.settings = settings
        self.gate = asyncio.Event()
        self.gate.set()
        self.quiet = asyncio.Event()
        self.calls = 0
        self.counts = Counts()
        self._prompts = iter(prompts)
        self._exhausted = False
        self._generate = generate
        self._reward = reward
        self._free = settings.slots
        self._queue: deque[_Job] = deque()
        self._ready: deque[GroupResult] = deque()
        self._tasks: set[asyncio.Task[list[Sample]]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._came = asyncio.Event()
        self._one_consumer = asyncio.Lock()
        self._closing = False

    async def __aenter__(self) -> Self:
        self._start_more()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- admission

    def _next_job(self) -> _Job | None:
        if self._queue:
            return self._queue.popleft()
        if not self._exhausted:
            prompt = next(self._prompts, None)
            if prompt is not None:
                return _Job(prompt)
            self._exhausted = True
            self._came.set()
        return None

    def _start_more(self) -> None:
        """Start whole groups while there is room. Called whenever a slot, the buffer or the gate opens."""
        settings = self.settings
        while not self._closing and self.gate.is_set() and len(self._ready) < settings.max_ready:
            if self._free < settings.per_group:
                return
            job = self._next_job()
            if job is None:
                return
            self._free -= settings.per_group
            job.held = settings.per_group
            job.tries += 1
            task = asyncio.create_task(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(partial(self._settle, job))

    # --- one group

    async def _run(self, job: _Job) -> list[Sample]:
        async with asyncio.timeout(self.settings.group_s), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._rollout(job, index)) for index in range(self.settings.per_group)]
            for task in tasks:
                task.add_done_callback(partial(self._release, job))
        return [task.result() for task in tasks]

    async def _rollout(self, job: _Job, index: int) -> Sample:
        sample = await self._generate(job.prompt, Rollout(self, index))
        sample.reward = await self._scored(sample)
        return sample

    async def _scored(self, sample: Sample) -> float:
        """The sample is good, so a scorer that fails is tried again alone."""
        tries = 0
        while True:
            tries += 1
            try:
                async with asyncio.timeout(self.settings.reward_s):
                    return await self._reward(sample)
            except Exception:
                if tries >= self.settings.attempts:
                    raise
            await asyncio.sleep(self.settings.backoff_s * 2 ** (tries - 1))

    def _release(self, job: _Job, _task: object) -> None:
        # A done-callback and not a finally: a child that is cancelled before its first step never enters its try.
        job.held -= 1
        self._free += 1
        self._start_more()

    def _settle(self, job: _Job, task: asyncio.Task[list[Sample]]) -> None:
        self._tasks.discard(task)
        self._free += job.held
        job.held = 0
        if self._closing:
            return
        if task.cancelled():
            self._requeue(job, delay=0.0)
        elif (error := task.exception()) is None:
            self._ready.append(GroupResult(job.prompt, task.result(), job.tries))
            self._came.set()
        elif _is_abort(error):
            self._requeue(job, delay=0.0)
        else:
            job.error = error
            job.attempts += 1
            if job.attempts >= self.settings.attempts:
                self.counts.given_up.append(job.prompt.id)
                self._came.set()
            else:
                self._requeue(job, delay=self.settings.backoff_s * 2 ** (job.attempts - 1))
        self._start_more()

    def _requeue(self, job: _Job, *, delay: float) -> None:
        self.counts.requeued += 1
        if not delay:
            self._queue.append(job)
            return

        def again() -> None:
            self._timers.discard(timer)
            self._queue.append(job)
            self._start_more()

        timer = asyncio.get_running_loop().call_later(delay, again)
        self._timers.add(timer)

    # --- the trainer's side

    def _is_over(self) -> bool:
        return self._exhausted and not (self._tasks or self._queue or self._timers)

    async def next_batch(self, size: int) -> list[GroupResult]:
        """Wait for so many groups; at the end of the data what is left, then EndOfData. Cancelled, nothing was taken."""
        async with self._one_consumer:
            while len(self._ready) < size and not self._is_over():
                self._came.clear()
                await self._came.wait()
            batch = [self._ready.popleft() for _ in range(min(size, len(self._ready)))]
        if not batch:
            raise EndOfData
        self.counts.delivered += len(batch)
        self._start_more()
        return batch

    @contextlib.asynccontextmanager
    async def weight_update(self, mode: str) -> AsyncGenerator[None]:
        """Stop sending, pause the server, let the caller change weights, go on."""
        self.gate.clear()
        try:
            await self.client.control("/pause_generation", {"mode": mode})
            if mode == "abort":
                await self._calls_end()
            yield
        finally:
            await asyncio.shield(self.client.control("/continue_generation", {}))
            self.gate.set()
            self._start_more()

    async def _calls_end(self) -> None:
        """Wait for the aborted calls; one that crossed the pause is parked on the server and ends after the resume."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                while self.calls:
                    self.quiet.clear()
                    await self.quiet.wait()


def _is_abort(error: BaseException) -> bool:
    """Nothing but aborted requests: no fault of the group's."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_abort(inner) for inner in error.exceptions)
    return isinstance(error, Aborted)
