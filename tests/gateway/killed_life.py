"""A life that is killed: a rollout of several turns with a ledger. ``python -m tests.gateway.killed_life ORDERS``, as JSON.

Says ``begun`` when nothing of an earlier life runs on the server any more, ``recorded N`` whenever the ledger has another turn on disk, and ``requests N replayed M`` at its end: how many requests
it sent to the server, and after how many of its turns ``rollout.replaying`` was still true.
"""

import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import trio

from trio_rollout import (
    Deadlines,
    EngineSettings,
    IterableSource,
    Prompt,
    Resume,
    SamplingParams,
    open_ledger,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout._core.ledger_events import TurnRecorded
from trio_rollout.gateway import open_gateway, run_agent
from trio_rollout.tiny import DATA
from trio_rollout.tools import LocalSandboxes


@attrs.frozen(kw_only=True)
class Orders:
    """One life. ``command`` is the agent's; None: the generate function talks to the server itself.

    ``killed_after``: the life is killed when so many turns are on disk. It writes nothing more then, so it can't end before.
    """

    ledger: str
    url: str
    folder: str
    turns: int
    command: list[str] | None = None
    killed_after: int | None = None
    env: dict[str, str] = attrs.field(factory=dict)


def say(*words):
    """One line, in one write: a kill cuts none in two."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


@attrs.define
class Telling:
    """A ledger that says when a turn is on disk."""

    inner: object
    last: int | None
    turns: int = 0

    async def begin(self, identity):
        return await self.inner.begin(identity)

    async def record(self, events):
        if self.last is not None and self.turns >= self.last:
            await trio.sleep_forever()
        await self.inner.record(events)
        for event in events:
            if isinstance(event, TurnRecorded):
                self.turns += 1
                say("recorded", self.turns)


@attrs.define
class Generate:
    """A rollout of so many turns, or of an agent in a sandbox."""

    orders: Orders
    replayed: int = 0

    async def __call__(self, prompt, rollout):
        return await (self.turns(rollout) if self.orders.command is None else self.agent(rollout))

    async def turns(self, rollout):
        ids, turns = [1, 2, 3], []
        for number in range(self.orders.turns):
            if self.orders.killed_after is not None and number == self.orders.turns - 1:
                await trio.sleep_forever()  # a sample that is finished has no turns to write
            self.replayed += rollout.replaying
            turns.append(await rollout.generate(ids, SamplingParams(max_new_tokens=8, ignore_eos=True)))
            ids = [*turns[-1].prompt_ids, *turns[-1].output_ids, 5]
        return rollout.finish(turns)

    async def agent(self, rollout):
        self.replayed += rollout.replaying
        sandboxes = LocalSandboxes(Path(self.orders.folder), env=self.orders.env)
        sampling = SamplingParams(max_new_tokens=512)
        async with (
            rollout.tools.open_sandbox(sandboxes) as sandbox,
            rollout.session(sampling=sampling) as session,
        ):
            ended = await run_agent(self.orders.command, session, sandbox, env=self.orders.env, seconds=200)
        if ended.exit_code:
            say("the agent failed:", ended.model_text())
        return session.trajectory()


async def main(orders):
    """Run the one rollout to its end."""
    generate = Generate(orders)

    async def one(trajectory):
        return float(trajectory.turns)

    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(open_sglang_servers([orders.url]))
        await servers.abort_until_idle()
        say("begun")
        ledger = await stack.enter_async_context(open_ledger(orders.ledger))
        gateway = None
        if orders.command is not None:
            gateway = await stack.enter_async_context(open_gateway(servers, tokenizer=DATA))
        engine = await stack.enter_async_context(
            open_rollout_engine(
                IterableSource([Prompt(id="only", input_ids=[1, 2, 3])]),
                generate,
                servers=servers,
                reward=one,
                ledger=Telling(ledger, orders.killed_after),
                gateway=gateway,
                settings=EngineSettings(
                    samples_per_prompt=1, max_running=1, resume=Resume.TURNS, deadlines=Deadlines(group=240)
                ),
            )
        )
        batch = await engine.next_batch(1)
        tokens = engine.statistics().tokens
        (trajectory,) = batch.groups[0].trajectories
        say("requests", servers.statistics().servers[0].requests, "replayed", generate.replayed)
        say("turns", trajectory.turns, "rows", len(trajectory.segments), "wasted", tokens.wasted_total)


if __name__ == "__main__":
    trio.run(main, Orders(**json.loads(sys.argv[1])))
