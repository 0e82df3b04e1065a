"""Tools inside an engine: some failures are observations, others requeue, and no process outlives its attempt."""

import math

import pytest
import trio

from trio_rollout import Cause, Deadlines, EngineSettings, IterableSource, Leftovers, Retry, Status, open_rollout_engine
from trio_rollout.testing import FakeServers, Say, prompts
from trio_rollout.tools import LocalSandboxes, SandboxCounts, SandboxSettings, open_rollout_tools

QUICK = {"samples_per_prompt": 1, "retry": Retry(backoff_base=0.0)}


def engine_of(generate, *, reward=None, **settings):
    servers = FakeServers(plan=lambda *_: Say(seconds=0.0))
    return open_rollout_engine(
        IterableSource(prompts(1)),
        generate,
        servers=servers,
        reward=reward,
        settings=EngineSettings(**{**QUICK, **settings}),
    )


class Wrapped:
    """Local sandboxes of which a test overrides one method."""

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
        seen.append(await rollout.tools.run_captured(["sleep", "600"]))
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate, deadlines=Deadlines(tool=0.2)) as engine:
        batch = await engine.next_batch(1)
        assert sum(engine.statistics().requeues.values()) == 0

    assert seen[0].timed_out
    assert batch.groups[0].trajectories[0].status is Status.COMPLETED


async def test_a_sandbox_that_cannot_be_created_is_infrastructure(tmp_path):
    """F041, F030: the sample starts from scratch in a new sandbox."""

    class HangsOnce(Wrapped):
        async def create(self, spec):
            attempts.append(spec.name)
            if len(attempts) == 1:
                await trio.sleep_forever()
            return await super().create(spec)

    attempts = []
    provider = HangsOnce(tmp_path / "sandboxes")

    async def generate(_prompt, rollout):
        async with rollout.tools.open_sandbox(provider, settings=SandboxSettings(create=0.2)) as sandbox:
            await sandbox.write_file("attempt", str(rollout.attempt))
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate) as engine:
        batch = await engine.next_batch(1)
        assert engine.statistics().retries[Cause.INFRASTRUCTURE] == 1

    assert batch.groups[0].attempt == 1
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
        async with rollout.tools.open_sandbox(provider, settings=SandboxSettings(backoff=0.01)) as sandbox:
            await sandbox.write_file("x", "y")
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate) as engine:
        batch = await engine.next_batch(1)

    assert batch.groups[0].trajectories[0].status is Status.COMPLETED
    assert provider.counts.leaked == 1
    for name in list(provider.inner._open):
        await provider.inner.destroy(name)


@pytest.mark.parametrize("escape", ["", "setsid sleep 600 & "])
async def test_a_cancelled_attempt_has_ended_its_processes_before_its_requeue_is_seen(processes, escape):
    """F086: cancelled during ``sleep 600``, the process is gone before the next attempt begins, also one that left its group."""
    alive_at_the_start = []

    async def generate(_prompt, rollout):
        alive_at_the_start.append(processes.marked())
        async with open_rollout_tools() as tools:  # which know no deadline, so that the attempt's own ends it
            if rollout.attempt == 1:
                await tools.run_captured(["sh", "-c", f"{escape}exec sleep 600"], timeout=600)
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
        await rollout.tools.run_captured(["sh", "-c", "echo up; exec sleep 600"], on_chunk=lambda *_: began.set())
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate):
        with trio.fail_after(120):
            await began.wait()

    assert processes.marked() == []


async def test_unused_tools_start_nothing(processes):
    async def generate(_prompt, rollout):
        assert not rollout.tools._supervisor.started
        turn = await rollout.generate([1, 2])
        seen.append(processes.children())
        return rollout.finish([turn])

    seen = []
    async with engine_of(generate) as engine:
        await engine.next_batch(1)

    assert seen == [0]


async def test_what_a_command_leaves_is_gone_when_its_generate_function_has_ended(processes):
    """Kept leftovers and open sessions end with the rollout, before its reward is computed."""

    async def generate(_prompt, rollout):
        kept = ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo up"]
        await rollout.tools.run_captured(kept, leftovers=Leftovers.KEEP)
        assert processes.marked() != []
        return rollout.finish([await rollout.generate([1, 2])])

    async def reward(_trajectory):
        await trio.lowlevel.checkpoint()
        alive.append(processes.marked())
        return 1.0

    alive = []
    async with engine_of(generate, reward=reward) as engine:
        await engine.next_batch(1)

    assert alive == [[]]


async def chatty(run, **options):
    """Run a command that writes every 50 ms for half a second."""
    return await run(["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.05; done"], **options)


async def in_tools(tools):
    return (await chatty(tools.run_captured)).exit_code


async def in_a_sandbox(tools):
    async with tools.open_sandbox() as sandbox:
        return (await chatty(sandbox.exec)).exit_code


async def in_a_session(tools):
    async with tools.open_sessions() as sessions:
        return (await chatty(sessions.exec_command, call_id="1", yield_time=30)).exit_code


async def in_quiet_steps(tools):
    """Run one silent command after the other."""
    return sum([(await tools.run_captured(["sleep", "0.05"])).exit_code for _ in range(20)])


@pytest.mark.parametrize("work", [in_tools, in_a_sandbox, in_a_session, in_quiet_steps])
async def test_tool_output_is_progress(work):
    """The work takes longer than ``no_progress``, without a new token."""
    limit = 3.0

    async def generate(_prompt, rollout):
        codes = []
        until = trio.current_time() + 1.3 * limit
        while trio.current_time() < until:
            codes.append(await work(rollout.tools))
        assert set(codes) == {0}
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate, deadlines=Deadlines(no_progress=limit)) as engine:
        await engine.next_batch(1)
        assert sum(engine.statistics().requeues.values()) == 0


async def test_a_silent_command_is_no_progress(processes):
    async def generate(_prompt, rollout):
        if rollout.attempt == 1:
            await rollout.tools.run_captured(["sleep", "600"])
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate, deadlines=Deadlines(no_progress=0.3)) as engine:
        batch = await engine.next_batch(1)
        assert engine.statistics().retries[Cause.NO_PROGRESS] == 1

    assert batch.groups[0].attempt == 1
    assert processes.marked() == []


class Service:
    """A remote provider in virtual time, whose ``hangs`` operations never return."""

    def __init__(self, hangs):
        self.counts = SandboxCounts()
        self.asked = []
        self._hangs = hangs

    async def _do(self, what):
        self.asked.append(what)
        await trio.sleep(math.inf if what in self._hangs else 0.1)

    async def create(self, _spec):
        await self._do("create")
        return self

    async def destroy(self, _name):
        await self._do("destroy")

    async def exec(self, _argv, **_limits):
        await self._do("exec")


@pytest.mark.parametrize("hangs", [["destroy"], ["create"], ["create", "destroy"], ["exec", "destroy"]])
async def test_leaving_an_engine_waits_no_longer_for_sandboxes_than_its_drain(autojump_clock, hangs):
    """P9: without the drain a sandbox would have 120 s to be created and 10 s to be destroyed."""
    service = Service(hangs)

    async def generate(_prompt, rollout):
        async with rollout.tools.open_sandbox(service) as sandbox:
            await sandbox.exec(["work"])
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate, deadlines=Deadlines(drain=6.0, abort=2.0)):
        await trio.sleep(1)
        left_at = trio.current_time()

    assert trio.current_time() - left_at <= 6.0
    assert service.asked[-1] == "destroy", "whatever became of its creation"
    assert service.counts.leaked == ("destroy" in hangs)


async def test_without_a_cancellation_a_sandbox_has_all_the_time_of_its_settings(autojump_clock):
    service = Service([])

    async def slow(_name):
        await trio.sleep(8)

    service.destroy = slow

    async def generate(_prompt, rollout):
        async with rollout.tools.open_sandbox(service, settings=SandboxSettings(destroy=10)):
            pass
        return rollout.finish([await rollout.generate([1, 2])])

    async with engine_of(generate, deadlines=Deadlines(drain=6.0, abort=2.0)) as engine:
        await engine.next_batch(1)

    assert (service.counts.destroyed, service.counts.leaked) == (1, 0)


async def test_a_sandbox_that_was_used_for_long_has_the_whole_cleanup_budget_when_it_is_cancelled(autojump_clock):
    """The cleanup budget begins with the cancellation, not with the sandbox."""
    service = Service(["exec"])

    async def slow(_name):
        await trio.sleep(1.5)

    service.destroy = slow

    async def generate(_prompt, rollout):
        async with rollout.tools.open_sandbox(service) as sandbox:
            await sandbox.exec(["work"])

    async with engine_of(generate, deadlines=Deadlines(drain=6.0, abort=2.0)):
        await trio.sleep(100)

    assert (service.counts.destroyed, service.counts.leaked) == (1, 0)


async def test_a_rollouts_tools_are_made_when_first_asked_for_and_are_the_same_from_then_on(processes):
    """A rollout without commands makes no tools; processes are dead when the generate function has ended."""
    seen = []

    async def generate(_prompt, rollout):
        before = rollout.opened_tools
        await rollout.tools.run_captured(["sh", "-c", "sleep 600 &"], leftovers=Leftovers.KEEP)
        seen.append((before, rollout.opened_tools is rollout.tools, len(processes.marked())))
        return rollout.finish([await rollout.generate([1, 2])])

    async def reward(_trajectory):
        seen.append(processes.marked())
        return 1.0

    async with engine_of(generate, reward=reward) as engine:
        await engine.next_batch(1)

    (before, same, alive), after = seen
    assert (before, same, after) == (None, True, [])
    assert alive >= 1
