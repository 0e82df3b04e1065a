"""The process that is killed: an engine with a ledger on tiny servers, and a trainer with a checkpoint.

Lives are made by a nest, which has imported everything and forks: a line with a life's orders in, its lines out, then
``ended`` and its exit status (-9 if it was killed, after as many seconds as its orders say). A life says what was offered,
an ack before and after it is made, and each sample's begin, end and record; what it said before it was killed has been read by
then.
"""

import faulthandler
import json
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from trio_rollout import (
    Batch,
    Drop,
    EngineSettings,
    Group,
    JsonlSource,
    Keep,
    PauseMode,
    Prompt,
    Retry,
    RolloutEngine,
    SamplingParams,
    Trajectory,
    open_ledger,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout._core.events import Event, SampleFinished
from trio_rollout._core.ledger_events import LedgerEvent, Recovered, RunIdentity, SampleKept
from trio_rollout.abc import Ledger, Rollout
from trio_rollout.errors import EndOfData
from trio_rollout.ledger._store import StoreLimits
from trio_rollout.observe import task_tree

SAMPLES = 3
SETTINGS = EngineSettings(
    samples_per_prompt=SAMPLES,
    max_running=12,
    max_ready=8,
    retry=Retry(max_attempts=3, backoff_base=0.01, backoff_max=0.02),
    failure_budget=100,
)
SIZES = StoreLimits(inline=2000, together=0, segment=200_000)
MOST_S = 240.0
"""Most seconds of a life that is not killed: one from beginning to end takes some 5 s on an idle machine."""
MODES = (PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE)


@attrs.frozen(kw_only=True)
class Orders:
    """One life: where, how, and for how long (None: to its own end)."""

    ledger: str
    prompts: str
    checkpoint: str
    urls: tuple[str, ...]
    epochs: int
    keep: bool
    seed: int
    life: int
    seconds: float | None = None


def say(word: str, *rest: object) -> None:
    """One line, in one write: a kill cuts none in two."""
    os.write(1, (" ".join([word, *map(str, rest)]) + "\n").encode())


def is_poison(number: int) -> bool:
    """Return True if a prompt fails in every attempt."""
    return number % 11 == 5


def is_dull(number: int) -> bool:
    """Return True if a prompt's group is filtered."""
    return number % 13 == 4 and not is_poison(number)


async def generate(life: int, prompt: Prompt, rollout: Rollout) -> Trajectory:
    """One turn, or two; some fail every time or now and then, every third is large enough for a segment.

    The last line of each turn's prompt is for the servers' notes.
    """
    number, sample = int(prompt.id), f"{prompt.group_id} {rollout.index} {rollout.attempt}"
    say("began", sample)
    try:
        turns = []
        for turn in range(1 + (number + rollout.index) % 2):
            text = f"{rollout.input}\n{life} {sample} {turn}"
            turns.append(await rollout.generate(text, SamplingParams(max_new_tokens=2 + number % 5, ignore_eos=True)))
        if is_poison(number) or (number % 7 == 2 and rollout.attempt % 2):
            raise ValueError(f"attempt {rollout.attempt} fails")
    finally:
        say("over", sample)
    return attrs.evolve(rollout.finish(turns), metadata={"padding": "x" * (20_000 if number % 3 == 0 else 10)})


async def reward(trajectory: Trajectory) -> float:
    return float(len(trajectory.text))


async def not_dull(group: Group) -> Keep | Drop:
    return Drop("dull") if is_dull(int(group.prompt.id)) else Keep()


class Finished:
    """An instrument that says which samples are finished."""

    def event(self, event: Event) -> None:
        """See ``Instrument``."""
        if isinstance(event, SampleFinished):
            say("finished", event.id, event.trajectory.index)


@attrs.frozen(eq=False)
class Recording:
    """A ledger that says which samples are on disk."""

    ledger: Ledger

    async def begin(self, identity: RunIdentity) -> Recovered:
        """See ``Ledger``."""
        return await self.ledger.begin(identity)

    async def record(self, events: Sequence[LedgerEvent]) -> None:
        """See ``Ledger``."""
        await self.ledger.record(events)
        for event in events:
            if isinstance(event, SampleKept):
                say("recorded", event.id, event.trajectory.index)


@attrs.define(kw_only=True)
class Trainer:
    """Trains each group once: what it trained is in its checkpoint, and a batch is acked once that is written."""

    engine: RolloutEngine
    urls: tuple[str, ...]
    path: Path
    rng: random.Random
    trained: dict[str, int] = attrs.field(factory=dict)
    step: int = -1
    out: list[Batch] = attrs.field(factory=list)

    async def begin(self) -> None:
        """Go on from the checkpoint, or where the engine is; give the servers weights if the last life died meanwhile."""
        self.load()
        if self.rng.random() < 0.5:
            await self.restore()
        await self.update()

    async def train(self) -> None:
        """Take batches until the data ends; checkpoint, go back and update weights now and then."""
        while True:
            try:
                batch = await self.engine.next_batch(self.rng.randint(1, 5))
            except EndOfData:
                break
            ids = [str(group.id) for group in batch.groups]
            say("offered", batch.step, *ids)
            self.trained.update(dict.fromkeys(ids, batch.step))
            self.out.append(batch)
            await self.now_and_then()
        await self.save()
        say("end")

    async def now_and_then(self) -> None:
        dice = self.rng.random()
        if dice < 0.45:
            await self.save()
        elif dice < 0.55:
            self.load()
            await self.restore()
        elif dice < 0.65:
            await self.update()

    async def restore(self) -> None:
        """Go back to the checkpoint."""
        say("restoring", self.step)
        await self.engine.restore(self.step)
        say("restored", self.step)

    def load(self) -> None:
        """Be what the checkpoint says."""
        self.out.clear()
        if self.path.exists():
            saved = json.loads(self.path.read_text("utf-8"))
            self.step, self.trained = saved["step"], saved["trained"]
        else:
            self.step, self.trained = -1, {}

    async def save(self) -> None:
        """Write the checkpoint, then ack what is in it."""
        if not self.out:
            return
        self.step = max(batch.step for batch in self.out)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({"step": self.step, "trained": self.trained}), "utf-8")
        beside.replace(self.path)
        while self.out:
            ids = [str(group.id) for group in self.out[0].groups]
            say("acking", self.out[0].step, *ids)
            await self.out.pop(0).ack()
            say("acked", *ids)

    async def update(self) -> None:
        """A weight update; the servers may be paused, or ahead of us, if a life before this one died in a window."""
        async with (
            self.engine.weight_update(mode=self.rng.choice(MODES)) as window,
            httpx.AsyncClient(trust_env=False) as client,
        ):
            body = {"new_version": str(window.version), "abort_all_requests": False}
            for url in self.urls:
                (await client.post(f"{url}/update_weight_version", json=body)).raise_for_status()
        say("updated", window.version)


async def live_within_reason(orders: Orders) -> None:
    """One life; one that would never end says what waits for what, and fails."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_look_when_late)
        await live(orders)
        nursery.cancel_scope.cancel()


async def _look_when_late() -> None:
    await trio.sleep(MOST_S)
    raise TimeoutError(f"a life has not ended after {MOST_S:g} s, and nothing killed it:\n{task_tree()}")


async def live(orders: Orders) -> None:
    """To the end of the data."""
    async with (
        open_sglang_servers(orders.urls) as servers,
        open_ledger(orders.ledger, keep_acked=orders.keep, sizes=SIZES) as ledger,
        open_rollout_engine(
            JsonlSource(orders.prompts, epochs=orders.epochs),
            partial(generate, orders.life),
            servers=servers,
            reward=reward,
            group_filter=not_dull,
            ledger=Recording(ledger),
            settings=SETTINGS,
            instruments=[Finished()],
        ) as engine,
    ):
        say("opened")
        trainer = Trainer(engine=engine, urls=orders.urls, path=Path(orders.checkpoint), rng=random.Random(orders.seed))
        await trainer.begin()
        await trainer.train()


def _hatch(orders: Orders) -> None:
    """In the forked process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    status = 1
    try:
        faulthandler.dump_traceback_later(MOST_S + 30, exit=True)  # if even the loop stands still
        trio.run(partial(live_within_reason, orders))
        status = 0
    except Exception:  # ruff: ignore[blind-except]  nothing but the status leaves this process
        traceback.print_exc()
    finally:
        os._exit(status)


def _orders(line: str) -> Orders:
    fields: dict[str, Any] = json.loads(line)
    return Orders(**{**fields, "urls": tuple(fields["urls"])})


def main() -> None:
    """Make lives until stdin closes."""
    logging.getLogger("trio_rollout").setLevel(logging.CRITICAL)  # groups fail and servers are paused, on purpose
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for line in sys.stdin:
        orders = _orders(line)
        pid = os.fork()
        if pid == 0:
            _hatch(orders)
        if orders.seconds is not None and signal.sigtimedwait({signal.SIGCHLD}, orders.seconds) is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        signal.sigtimedwait({signal.SIGCHLD}, 0)
        say("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
