"""1,000 rollouts of an engine, 64 at a time, with three commands each that end in every possible way.

No process, descriptor or thread is left, and memory is flat.
"""

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import attrs
import pytest
import trio

from trio_rollout import Deadlines, EngineSettings, IterableSource, Leftovers, Retry, open_rollout_engine
from trio_rollout.testing import FakeServers, Say, prompts

# What a command does; each also has something that would outlive it if it could.
SCRIPTS = {
    "clean": "echo done",
    "noisy": "head -c 200000 /dev/zero | tr '\\0' x",
    "holds the output": "sleep 600 & echo done",
    "escapes": "setsid sleep 600 & exec sleep 600",
    "ignores SIGTERM": "trap '' TERM; (trap '' TERM; sleep 600) & sleep 600; sleep 600",
    "kills itself": "sleep 600 & kill -9 $$",
    "forks on": "for i in 1 2 3 4 5 6 7 8; do (sleep 600 &) ; done; exec sleep 600",
    "leaves a server": "sleep 600 >/dev/null 2>&1 & echo started",
}
ENDS = ("by itself", "timeout", "event", "scope")


@attrs.define
class Count:
    """Counts of the ends of commands, and samples of the host's memory."""

    ends: Counter = attrs.field(factory=Counter)
    memory: list = attrs.field(factory=list)
    rollouts: int = 0


def resident_mb():
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def one_command(tools, draw, count):
    script, end = draw.choice(list(SCRIPTS)), draw.choice(ENDS)
    after = draw.uniform(0.0, 0.15)
    cancel = trio.Event()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def stop_it():
            if end == "by itself":
                return
            await trio.sleep(after)
            if end == "event":
                cancel.set()
            elif end == "scope":
                nursery.cancel_scope.cancel()

        limit = after if end == "timeout" else 0.3
        keep = Leftovers.KEEP if script == "leaves a server" else Leftovers.KILL
        argv = ["sh", "-c", SCRIPTS[script]]
        if draw.random() < 0.2:
            async with tools.open_sessions(drain_timeout=0) as sessions:
                output = await sessions.exec_to_completion(argv, call_id="c", timeout=limit)
                count.ends["session", output.timed_out] += 1
        else:
            result = await tools.run_captured(argv, timeout=limit, cancel=cancel, leftovers=keep)
            assert not result.unreaped
            count.ends[result.stop.value, result.exit_code] += 1
        nursery.cancel_scope.cancel()


class Commands:
    """A generate function: three commands, then a turn. Some rollouts are cancelled, some fail."""

    def __init__(self, count):
        self.count = count

    async def __call__(self, prompt, rollout):
        draw = random.Random(f"{prompt.id}.{rollout.index}.{rollout.attempt}")
        fails = rollout.attempt == 1 and draw.random() < 0.03
        with trio.CancelScope() as scope:
            if draw.random() < 0.1:
                scope.deadline = trio.current_time() + draw.uniform(0.0, 0.5)
            for _ in range(3):
                await one_command(rollout.tools, draw, self.count)
                if fails:
                    raise RuntimeError("this rollout fails")
        self.count.ends["rollout's commands cancelled"] += scope.cancelled_caught
        turn = await rollout.generate(rollout.input)
        self.count.rollouts += 1
        self.count.memory.append(resident_mb())
        return rollout.finish([turn])


async def run_rollouts(rollouts, at_a_time, *, samples=4):
    """Run rollouts through an engine, with weight updates that abort and requeue them and their commands."""
    count, version = Count(), 0
    servers = FakeServers(plan=lambda *_: Say(seconds=0.05))
    async with open_rollout_engine(
        IterableSource(prompts(rollouts // samples)),
        Commands(count),
        servers=servers,
        settings=EngineSettings(
            samples_per_prompt=samples,
            max_running=at_a_time,
            deadlines=Deadlines(tool=5.0),
            retry=Retry(max_attempts=100, backoff_base=0.0),
        ),
    ) as engine:
        async for batch in engine.batches(max(1, rollouts // samples // 5)):
            await batch.ack()
            version += 1
            async with engine.weight_update(version=version):
                servers.set_version(version)
        now = engine.statistics()
        assert (now.acked, now.quarantined) == (rollouts // samples, 0)
        count.ends.update({f"requeued: {cause.value}": number for cause, number in now.requeues.items() if number})
    return count


def require_nothing_left(processes, before, count):
    """Check that memory is flat: at the end within 20 MB or 5 % of its size after a fifth of the run."""
    assert processes.marked() == []
    assert (processes.children(), processes.descriptors()) == (0, before)
    assert [thread.name for thread in threading.enumerate() if not thread.daemon] == [threading.main_thread().name]
    early, late = max(count.memory[: len(count.memory) // 5]), count.memory[-1]
    assert late <= early + max(20, early * 0.05)


async def soak(processes, rollouts):
    await run_rollouts(2, 2, samples=2)  # whatever is opened once is open now
    before, began = processes.descriptors(), time.monotonic()
    count = await run_rollouts(rollouts, 64)
    print(  # ruff: ignore[print]  the numbers are the point of a soak
        f"\n{count.rollouts} rollouts to their end, {time.monotonic() - began:.0f} s;",
        f"resident {count.memory[len(count.memory) // 5]:.0f} MB after a fifth, {count.memory[-1]:.0f} MB at the end,",
        f"{max(count.memory):.0f} MB at most; ends {dict(count.ends.most_common())}",
    )
    require_nothing_left(processes, before, count)


async def test_forty_rollouts_leave_nothing(processes):
    await soak(processes, 40)


@pytest.mark.soak
async def test_a_thousand_rollouts_leave_nothing(processes):
    await soak(processes, 1000)
