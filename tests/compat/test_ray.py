"""A local Ray cluster of three engines: one killed in the middle, the lease service restarted: each group exactly once.

Functions are made inside of the tests, so that Ray sends them by value: its workers can't import the tests.
"""

import functools
import time

import attrs
import pytest

from trio_rollout import Cause, Deadlines, EngineSettings, IterableSource, Prompt, Retry
from trio_rollout.errors import EndOfData, EngineClosed, RolloutError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("default"),  # Ray's own are many
]

SETTINGS = EngineSettings(samples_per_prompt=2, max_running=8, max_ready=6, deadlines=Deadlines(group=60, drain=10))


@pytest.fixture(autouse=True)  # ruff: ignore[pytest-fixture-autouse]  in place of the plugin's
def _no_leaks():
    """Ignore processes that are left: Ray starts and ends them as it likes."""


@pytest.fixture(scope="module")
def ray():
    """A small cluster on this machine. Few CPUs: Ray starts an idle process for each."""
    ray = pytest.importorskip("ray")
    niceness = {"worker_niceness": 0}  # Ray's default is so nice that on a busy machine an actor takes minutes to start
    ray.init(
        num_cpus=1,
        object_store_memory=100_000_000,
        include_dashboard=False,
        log_to_driver=False,
        _system_config=niceness,
    )
    yield ray
    ray.shutdown()


def source_of(count):
    return functools.partial(made, count)


def made(count):
    return IterableSource(Prompt(id=f"p{number}", text="say") for number in range(count))


def parts_of(seconds):
    """Each node has its own fake servers, and rewards a group with the id of its process."""

    def make():
        import os
        from contextlib import asynccontextmanager

        from trio_rollout import SingleTurn
        from trio_rollout.testing import FakeServers, Say
        from trio_rollout_compat.ray import NodeParts

        async def reward(trajectory):
            return float(os.getpid())

        @asynccontextmanager
        async def parts():
            servers = FakeServers(plan=lambda number, prompt: Say(seconds=seconds))
            yield NodeParts(generate=SingleTurn(), servers=servers, reward=reward)

        return parts()

    return make


@pytest.fixture
def opened(ray, tmp_path):
    """``opened(count)``: rollouts of so many prompts on three nodes, with a ledger."""
    import sys

    from ray import cloudpickle

    from trio_rollout_compat.ray import open_ray_rollouts

    cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def opened(count, *, seconds=0.05, nodes=3, ledger=True, parts=None, settings=SETTINGS, **more):
        where = tmp_path / "ledger" if ledger else None
        options = {"num_cpus": 0.1}
        return open_ray_rollouts(
            source_of(count),
            parts or parts_of(seconds),
            nodes=nodes,
            ledger=where,
            settings=settings,
            node_options=options,
            **more,
        )

    yield opened
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def drain(ray, rollouts, size=3, after=None):
    """Take every group, as a trainer would; return the ids of the groups and of the processes that ran them."""
    ids, processes = [], set()
    while True:
        try:
            batch = rollouts.next_batch(size, timeout=60)
        except EndOfData:
            return ids, processes
        groups = ray.get(list(batch.groups))
        if after is not None:
            after(len(ids))
        batch.ack()
        assert [group.id for group in groups] == list(batch.ids)
        ids += [group.prompt.id for group in groups]
        processes |= {row.reward for group in groups for row in group.trajectories}


def everything(count):
    return sorted(f"p{number}" for number in range(count))


def test_three_nodes_share_the_work(ray, opened):
    with opened(60) as rollouts:
        ids, processes = drain(ray, rollouts)
        counts = rollouts.statistics()
    assert sorted(ids) == everything(60)
    assert len(processes) == 3
    assert (counts.acked, counts.running) == (60, 0)


def kill_a_node(ray, processes):
    """Kill a process, as the kernel would."""
    import os
    import signal

    os.kill(int(min(processes)), signal.SIGKILL)


def test_a_node_killed_in_the_middle_costs_no_group(ray, opened):
    with opened(90) as rollouts:
        first = rollouts.next_batch(6, timeout=60)
        groups = ray.get(list(first.groups))
        kill_a_node(ray, {row.reward for group in groups for row in group.trajectories})
        ids, _ = drain(ray, rollouts)
        first.ack()
        ids += [group.prompt.id for group in groups]
        counts = rollouts.statistics()
    assert sorted(ids) == everything(90)
    assert counts.quarantined == 0
    assert counts.acked == 90


def failing_parts():
    """Each failure on the nodes by prompt, sample and try; some come out of Ray's tasks and actors of the user's."""
    import os
    from contextlib import asynccontextmanager

    import ray

    from trio_rollout import SingleTurn
    from trio_rollout.errors import InfrastructureError
    from trio_rollout.testing import FakeServers
    from trio_rollout_compat.ray import NodeParts
    from trio_rollout_compat.ray._actors import await_ray

    class NoGpu(InfrastructureError):
        """Of the user's, known to the nodes only."""

    class JudgeDown(Exception):
        __module__ = "judges"
        __qualname__ = "JudgeDown"

    @ray.remote(num_cpus=0)
    def fail():
        raise NoGpu("in a task of the user's")

    @ray.remote(num_cpus=0)
    class Doomed:
        def die(self):
            os._exit(1)

    def die():
        return Doomed.remote().die.remote()

    planned = {
        ("p0", 1, 1): NoGpu("gone"),
        ("p0", 1, 2): NoGpu("gone"),
        ("p1", 0, 1): JudgeDown("503"),
        ("p1", 1, 1): fail.remote,
        ("p1", 1, 2): die,
        ("p2", 1, 1): KeyError("no such column"),
        ("p2", 1, 2): KeyError("no such column"),
    }

    async def generate(prompt, rollout):
        made = await SingleTurn()(prompt, rollout)
        failure = planned.get((prompt.id, rollout.index, rollout.attempt))
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            await await_ray(failure())
        return made

    async def group_reward(group):
        return [float(len(group.trajectories))] * len(group.trajectories)

    @asynccontextmanager
    async def parts():
        yield NodeParts(generate=generate, servers=FakeServers(), group_reward=group_reward)

    return parts()


def test_what_fails_on_a_node_is_counted_as_it_would_be_in_one_engine(ray, opened):
    """Classes that only nodes and tasks of the user's know keep name and cause; a group reward runs on a node."""
    retry = Retry(max_attempts=2, infrastructure=("judges.JudgeDown",), backoff_base=0.01)
    settings = attrs.evolve(SETTINGS, retry=retry)
    with opened(4, nodes=2, parts=failing_parts, settings=settings, ledger=False) as rollouts:
        groups = ray.get(list(rollouts.next_batch(4, timeout=60).groups))
        counts, (report,) = rollouts.statistics(), rollouts.quarantined()
    assert sorted(group.prompt.id for group in groups) == ["p0", "p1", "p3"]
    assert {row.reward for group in groups for row in group.trajectories} == {2.0}
    assert {cause: count for cause, count in counts.retries.items() if count} == {
        Cause.INFRASTRUCTURE: 5,
        Cause.ERROR: 1,
    }
    assert (report.cause, report.attempts, report.error.type) == (Cause.ERROR, 2, "KeyError")
    assert "in generate" in report.error.traceback
    assert counts.tokens.wasted[Cause.INFRASTRUCTURE] == 5 * 4


def test_a_killed_node_and_a_lease_service_killed_twice_lose_nothing_and_repeat_nothing(ray, opened):
    """The service goes on from its ledger; batches that the trainer has and has not acked do not come again."""
    with opened(90) as rollouts:
        held, ids, processes = [], [], set()

        def kill_now_and_then(done):
            if done in {15, 30}:
                ray.kill(rollouts._service, no_restart=False)
            if done == 21:
                kill_a_node(ray, processes)

        for _ in range(2):
            batch = rollouts.next_batch(4, timeout=60)
            held.append(batch)
            groups = ray.get(list(batch.groups))
            ids += [group.prompt.id for group in groups]
            processes |= {row.reward for group in groups for row in group.trajectories}
        more, _ = drain(ray, rollouts, after=kill_now_and_then)
        for batch in held:
            batch.ack()
        with pytest.raises(RolloutError, match="acked already"):
            held[0].ack()
        counts = rollouts.statistics()
    assert sorted(ids + more) == everything(90)
    assert counts.acked == 90


def test_a_trainer_that_starts_again_gets_what_was_not_acked(ray, opened):
    """The second trainer finds the ledger: it gets the groups that were not acked, and no others."""
    with opened(60) as rollouts:
        acked = []
        for _ in range(4):
            batch = rollouts.next_batch(3, timeout=60)
            acked += [group.prompt.id for group in ray.get(list(batch.groups))]
            batch.ack()
        lost = rollouts.next_batch(3, timeout=60).ids
    with opened(60) as rollouts:
        again = rollouts.next_batch(3, timeout=60)
        assert again.redelivered
        assert set(again.ids) == set(lost)
        acked += [group.prompt.id for group in ray.get(list(again.groups))]
        again.ack()
        ids, _ = drain(ray, rollouts)
    assert sorted(acked + ids) == everything(60)


def test_a_batch_s_references_outlive_the_service(ray, opened):
    with opened(30) as rollouts:
        batch = rollouts.next_batch(3, timeout=60)
        ray.kill(rollouts._service, no_restart=False)
        assert len(ray.get(list(batch.groups))) == 3
        batch.ack()


def test_back_pressure_holds_across_the_actors(ray, opened):
    """No batch is taken: ready groups are bounded, and then nothing is sampled any more."""
    with opened(500, seconds=0.01, ledger=False) as rollouts:
        quiet = wait_until_quiet(rollouts)
        rollouts.next_batch(1, timeout=60)
        again = wait_until_quiet(rollouts)
    assert quiet.ready == again.ready == SETTINGS.max_ready
    assert quiet.pulled <= again.pulled < 60


def wait_until_quiet(rollouts):
    """Wait until the buffer is full and no rollout has a slot; return the counts."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        counts = rollouts.statistics()
        if counts.ready == SETTINGS.max_ready and not counts.running_rollouts:
            break
        time.sleep(0.1)
    return counts


def test_without_a_ledger_a_dead_service_is_the_end(ray, opened):
    with opened(30, ledger=False) as rollouts:
        rollouts.next_batch(1, timeout=60)
        ray.kill(rollouts._service)
        with pytest.raises(EngineClosed, match="the lease service is gone"):
            rollouts.next_batch(1, timeout=60)
        with pytest.raises(EngineClosed):
            rollouts.statistics()


def test_a_timeout_takes_nothing(ray, opened):
    with opened(4, seconds=3.0) as rollouts:
        with pytest.raises(TimeoutError, match=r"fewer groups were finished within 0\.2 s"):
            rollouts.next_batch(4, timeout=0.2)
        assert len(rollouts.next_batch(4, timeout=60).ids) == 4


def test_what_a_node_needs_that_fails_is_told_at_once(ray, tmp_path):
    from trio_rollout_compat.ray import open_ray_rollouts

    def parts():
        raise ValueError("no such model")

    with (
        pytest.raises(ray.exceptions.RayActorError, match="no such model"),
        open_ray_rollouts(functools.partial(IterableSource, []), parts, nodes=1, settings=SETTINGS),
    ):
        raise AssertionError("it must not get here")
