"""The process that is killed while most siblings are finished: 8 groups of 8 samples of 10 turns.

``python -m tests.kill.siblings LEDGER MOMENT``. It prints ``turn GROUP SAMPLE NUMBER`` when the server is asked for a turn, and
``written GROUP SAMPLE`` when a finished sample is on disk. The last sample of each group hangs in its fourth turn. The
process kills itself at the moment that is asked for: no test has to guess it.

written: seven of eight samples are finished and on disk.
lingering: the first four are on disk; three more are finished and about to be written.
never: nothing hangs, and the run comes to its end.
"""

import os
import signal
import sys
from collections.abc import Sequence

import attrs
import trio

from trio_rollout import (
    EngineSettings,
    IterableSource,
    Prompt,
    SamplingParams,
    Trajectory,
    open_ledger,
    open_rollout_engine,
)
from trio_rollout._core.ledger_events import LedgerEvent, Recovered, RunIdentity, SampleKept
from trio_rollout.abc import Ledger, Rollout
from trio_rollout.testing import FakeServers, Say

GROUPS, SAMPLES, TURNS = 8, 8, 10
EARLY, LAST, HANGS_AT = 4, SAMPLES - 1, 3
"""Samples below EARLY finish first. LAST hangs once it has had HANGS_AT turns."""


def say(word: str, *rest: object) -> None:
    """One line, in one write."""
    os.write(1, (" ".join([word, *map(str, rest)]) + "\n").encode())


def served(_: int, prompt: Sequence[int]) -> Say:
    """Return the server's answer; a prompt names its group, its sample and its turn."""
    say("turn", *prompt)
    return Say(tokens=2, seconds=0.001)


@attrs.define(eq=False)
class Deadly:
    """A ledger that kills its process when the moment has come."""

    ledger: Ledger
    moment: str
    early: trio.Event = attrs.field(factory=trio.Event)
    """The samples that finish first are on disk."""
    written: int = 0

    async def begin(self, identity: RunIdentity) -> Recovered:
        """See ``Ledger``."""
        return await self.ledger.begin(identity)

    async def record(self, events: Sequence[LedgerEvent]) -> None:
        """See ``Ledger``."""
        kept = [(event.id.prompt, event.trajectory.index) for event in events if isinstance(event, SampleKept)]
        if self.moment == "lingering" and any(index >= EARLY for _, index in kept):
            os.kill(os.getpid(), signal.SIGKILL)
        await self.ledger.record(events)
        for group, index in kept:
            say("written", group, index)
        self.written += len(kept)
        if self.written >= GROUPS * EARLY:
            self.early.set()
        if self.moment == "written" and self.written == GROUPS * LAST:
            os.kill(os.getpid(), signal.SIGKILL)


async def main(path: str, moment: str) -> None:
    """Run until the kill, or to the end."""
    async with open_ledger(path) as on_disk:
        ledger = Deadly(on_disk, moment)

        async def generate(prompt: Prompt, rollout: Rollout) -> Trajectory:
            turns = []
            for number in range(TURNS):
                if moment != "never" and rollout.index == LAST and number == HANGS_AT:
                    await trio.sleep_forever()
                if moment != "never" and rollout.index >= EARLY:
                    await ledger.early.wait()
                ids = [int(prompt.id), rollout.index, number]
                turns.append(await rollout.generate(ids, SamplingParams(max_new_tokens=2)))
            return rollout.finish(turns)

        async def reward(_: Trajectory) -> float:
            return 1.0

        async with open_rollout_engine(
            IterableSource([Prompt(id=str(number), input_ids=[number]) for number in range(GROUPS)]),
            generate,
            servers=FakeServers(plan=served),
            reward=reward,
            ledger=ledger,
            settings=EngineSettings(samples_per_prompt=SAMPLES, max_running=GROUPS * SAMPLES),
        ) as engine:
            async for batch in engine.batches(GROUPS):
                await batch.ack()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
