"""Tools inside an engine: which failures are observations, which requeue, and that nothing outlives its attempt."""

import pytest
import trio

from trio_rollout import Cause, Deadlines, EngineSettings, IterableSource, Retry, Status, open_rollout_engine
from trio_rollout.testing import FakeServers, Say, prompts
from trio_rollout.tools import LocalSandboxes, SandboxSettings, open_rollout_tools

QUICK = {"samples_per_prompt": 1, "retry": Retry(backoff_base=0.0)}


def engine_of(generate, **settings):
    servers = FakeServers(plan=lambda *_: Say(seconds=0.0))
    return open_rollout_engine(
        IterableSource(prompts(1)), generate, servers=servers, settings=EngineSettings(**{**QUICK, **settings})
    )


class Wrapped:
    """Local sandboxes, for a test that changes one thing about them."""

    def __init__(self, root):
        self.inner = LocalSandboxes(root)
        self.counts = self.inner.counts

    async def create(self, spec):
        return await self.inner.create(spec)

    async def destroy(self, name):
        await self.inner.destroy(name)

    async def sweep(self, label):
        return await self.inner.sweep(label)


async def test_a_command_over_its_limit_is_an_observation_and_the_rollout_completes():
    """F041"""
    seen = []

    async def generate(_prompt, rollout):
        async with open_rollout_tools(deadline=rollout.deadline, deadlines=Deadlines(tool=0.2)) as tools:
            seen.append(await tools.run_captured(["sleep", "600"]))
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate) as engine:
        batch = await engine.next_batch(1)
        assert sum(engine.statistics().requeues.values()) == 0

    assert seen[0].timed_out
    assert batch.groups[0].trajectories[0].status is Status.COMPLETED


async def test_a_sandbox_that_cannot_be_created_is_infrastructure_and_requeues(tmp_path):
    """F041, F030: the group starts from scratch in a new sandbox."""

    class HangsOnce(Wrapped):
        async def create(self, spec):
            attempts.append(spec.name)
            if len(attempts) == 1:
                await trio.sleep_forever()
            return await super().create(spec)

    attempts = []
    provider = HangsOnce(tmp_path / "sandboxes")

    async def generate(_prompt, rollout):
        async with (
            open_rollout_tools(deadline=rollout.deadline) as tools,
            tools.open_sandbox(provider, settings=SandboxSettings(create=0.2)) as sandbox,
        ):
            await sandbox.write_file("attempt", str(rollout.attempt))
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate) as engine:
        batch = await engine.next_batch(1)
        assert engine.statistics().requeues[Cause.ERROR] == 1

    assert batch.groups[0].attempt == 2
    assert len(set(attempts)) == 2
    assert list(provider.inner.root.iterdir()) == []


async def test_a_cleanup_that_fails_changes_no_result(tmp_path):
    """F091: the sample is delivered, the leak is counted."""

    class Refuses(Wrapped):
        async def destroy(self, _name):
            await trio.lowlevel.checkpoint()
            raise RuntimeError("500")

    provider = Refuses(tmp_path / "sandboxes")

    async def generate(_prompt, rollout):
        async with (
            open_rollout_tools() as tools,
            tools.open_sandbox(provider, settings=SandboxSettings(backoff=0.01)) as sandbox,
        ):
            await sandbox.write_file("x", "y")
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate) as engine:
        batch = await engine.next_batch(1)

    assert batch.groups[0].trajectories[0].status is Status.COMPLETED
    assert provider.counts.leaked == 1
    for name in list(provider.inner._open):
        await provider.inner.destroy(name)


@pytest.mark.parametrize("flee", ["", "setsid sleep 600 & "])
async def test_a_cancelled_attempt_has_ended_its_processes_before_its_requeue_is_seen(processes, flee):
    """F086: cancel during ``sleep 600``; the pid is gone before the next attempt begins, escapees too."""
    alive_at_the_start = []

    async def generate(_prompt, rollout):
        alive_at_the_start.append(processes.marked())
        async with open_rollout_tools() as tools:  # which know no deadline, so that the attempt's own ends it
            if rollout.attempt == 1:
                await tools.run_captured(["sh", "-c", f"{flee}exec sleep 600"], timeout=600)
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate, deadlines=Deadlines(group=1.0, tool=None)) as engine:
        batch = await engine.next_batch(1)
        requeues = engine.statistics().requeues

    assert alive_at_the_start == [[], []]
    assert batch.groups[0].attempt == 2
    assert requeues[Cause.DEADLINE] == 1


async def test_leaving_the_engine_ends_the_tools_of_running_rollouts(processes):
    began = trio.Event()

    async def generate(_prompt, rollout):
        async with open_rollout_tools(deadline=rollout.deadline) as tools:
            await tools.run_captured(["sh", "-c", "echo up; exec sleep 600"], on_chunk=lambda *_: began.set())
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate):
        with trio.fail_after(120):
            await began.wait()

    assert processes.marked() == []
