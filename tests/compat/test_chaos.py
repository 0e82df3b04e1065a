"""An engine full of misbehaving asyncio functions delivers everything all the same, and its report names them."""

import asyncio
import contextlib
import logging
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio

from trio_rollout import Deadlines, EngineSettings, IterableSource, Retry, open_rollout_engine
from trio_rollout.errors import EndOfData
from trio_rollout.testing import FakeServers, Say, prompts
from trio_rollout_compat import BridgeSettings, asyncio_generate, asyncio_reward, open_bridge
from trio_rollout_compat.bridge import Misuse

from .handshake import forever


async def hanging(rng):
    await forever()


async def swallowing(rng):
    with contextlib.suppress(asyncio.CancelledError):
        await forever()


async def deaf(rng):
    for _ in range(rng.randrange(1, 8)):
        with contextlib.suppress(asyncio.CancelledError):
            await forever()


async def leaking(rng):
    task = asyncio.create_task(forever_in_task())
    await asyncio.sleep(0)
    del task


async def forever_in_task():
    await forever()


async def blocking(rng):
    threading.Event().wait(0.002)


async def exiting(rng):
    raise SystemExit(1)


async def crashing(rng):
    raise ValueError("now and then")


async def good(rng):
    await asyncio.sleep(0)


FAULTS = [hanging, swallowing, deaf, leaking, blocking, exiting, crashing]


async def run(backend, *, count, seed, bridge_settings, deadlines):
    """Let every third call misbehave; return the counts of each kind."""
    rng, done = random.Random(seed), []

    async def misbehave():
        fault = rng.choice(FAULTS) if rng.random() < 0.3 else good
        done.append(fault)
        await fault(rng)

    async def generate(prompt, rollout):
        await misbehave()
        return rollout.finish([await rollout.generate(rollout.input)])

    async def score(trajectory):
        await misbehave()
        return 1.0

    async with (
        open_bridge(backend, settings=bridge_settings) as bridge,
        open_rollout_engine(
            IterableSource(prompts(count)),
            asyncio_generate(generate, bridge=bridge),
            servers=FakeServers(plan=lambda number, prompt: Say(seconds=0)),
            reward=asyncio_reward(score, bridge=bridge),
            settings=EngineSettings(
                samples_per_prompt=2,
                max_running=16,
                deadlines=deadlines,
                retry=Retry(max_attempts=1000, backoff_base=0.001, backoff_max=0.001),
            ),
        ) as engine,
    ):
        ids = []
        with contextlib.suppress(EndOfData):
            while True:
                ids += [group.prompt.id for group in (await engine.next_batch(4)).groups]
        given_up = [report.id.prompt for report in engine.quarantined()]  # a scorer that failed alike twice in a row
        assert sorted(ids + given_up) == sorted(f"p{number}" for number in range(count))
        assert len(given_up) <= count // 5
        assert engine.statistics().running_rollouts == 0
        report = bridge.statistics()
    assert bridge.statistics().running == 0
    assert bridge.statistics().zombies == 0
    assert all(name.endswith(("generate", "score")) for names in report.misuse.values() for name in names), report
    return done, {kind: sum(names.values()) for kind, names in report.misuse.items()}, bridge


async def test_ten_minutes_of_it(autojump_clock, caplog):
    """In virtual time, so ten minutes of deadlines take seconds."""
    caplog.set_level(logging.CRITICAL)
    begun = trio.current_time()
    done, counts, _ = await run(
        "in-loop",
        count=100,
        seed=1,
        bridge_settings=BridgeSettings(again=1, grace=5, slow_step=0.001),
        deadlines=Deadlines(group=200, reward=120),
    )
    assert trio.current_time() - begun > 600
    assert set(FAULTS) <= set(done)
    assert {Misuse.SWALLOWED, Misuse.ABANDONED, Misuse.LEAKED, Misuse.BLOCKED, Misuse.EXITED} <= set(counts)
    assert counts[Misuse.EXITED] == done.count(exiting)


@pytest.mark.parametrize("count", [20, pytest.param(6000, marks=pytest.mark.soak)])
async def test_on_a_thread_of_its_own(caplog, count):
    """The long version takes about ten minutes."""
    caplog.set_level(logging.CRITICAL)
    done, counts, _ = await run(
        "thread",
        count=count,
        seed=2,
        bridge_settings=BridgeSettings(again=0.005, grace=20, slow_step=0.001),
        deadlines=Deadlines(group=0.2, reward=0.1),
    )
    assert counts[Misuse.EXITED] >= done.count(exiting) > 0


def test_every_offender_is_named_by_the_long_run_s_script():
    """Run the soak test for a few seconds; its output says what is wrong."""
    script = Path(__file__).parents[1] / "soak" / "chaos_hosts.py"
    answer = subprocess.run(
        [sys.executable, script, "--minutes", "0.05"], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "is_deaf" in answer.stdout
