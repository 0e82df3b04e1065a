"""A Ray cluster of two machines (two raylets on this one), one of which dies with everything on it: its samples in flight run again."""

import contextlib
import functools
import sys
import time

import pytest

from trio_rollout import Cause, Deadlines, EngineSettings, IterableSource, Prompt, Retry
from trio_rollout.errors import EndOfData

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("default"),  # Ray's own are many
]

GROUPS, SAMPLES, TURNS = 30, 4, 4
SETTINGS = EngineSettings(
    samples_per_prompt=SAMPLES,
    max_running=8,
    max_ready=6,
    deadlines=Deadlines(group=60, drain=10),
    retry=Retry(max_attempts=1),  # a loss that were charged to a sample would quarantine its group
)
# Ray's default takes half a minute to see that a machine is gone.
SOON = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
}


@pytest.fixture(autouse=True)  # ruff: ignore[pytest-fixture-autouse]  in place of the plugin's
def _no_leaks():
    """Ignore processes that are left: Ray starts and ends them as it likes."""


@pytest.fixture
def cluster():
    """Two machines; the first has the trainer, and everything without a placement."""
    ray = pytest.importorskip("ray")
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    few = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(
        initialize_head=True,
        connect=True,
        head_node_args={**few, "resources": {"first": 1}, "include_dashboard": False, "_system_config": SOON},
    )
    cluster.doomed = cluster.add_node(**few, resources={"second": 1})
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def source():
    return IterableSource(Prompt(id=f"p{number}", text="say") for number in range(GROUPS))


def parts(log):
    """Fake servers on each node. Each turn of a sample is a line of the log: node, prompt, sample, try, number of the turn."""
    from contextlib import asynccontextmanager

    import ray

    from trio_rollout.testing import FakeServers, Say
    from trio_rollout_compat.ray import NodeParts

    where = ray.get_runtime_context().get_node_id()

    async def generate(prompt, rollout):
        turns = []
        for number in range(TURNS):
            turns.append(await rollout.generate("say"))
            with log.open("a") as file:
                file.write(f"{where} {prompt.id} {rollout.index} {rollout.attempt} {number}\n")
        return rollout.finish(turns)

    @asynccontextmanager
    async def parts():
        servers = FakeServers(plan=lambda number, prompt: Say(seconds=0.05 + 0.02 * (number % 5)))
        yield NodeParts(generate=generate, servers=servers)

    return parts()


def turns_of(log):
    """Return the turns that were sampled, by sample: (node, try, number of the turn)."""
    found = {}
    for line in log.read_text().splitlines():
        node, prompt, index, attempt, number = line.split()
        found.setdefault((prompt, int(index)), []).append((node, int(attempt), int(number)))
    return found


def test_f102_a_machine_that_dies_costs_its_samples_in_flight(cluster, tmp_path):
    """Its engine is started again on the other one. Of the turns only those are sampled again that its unfinished samples had."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trio_rollout_compat.ray import open_ray_rollouts

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    log, ids = tmp_path / "turns", []
    with open_ray_rollouts(
        source,
        functools.partial(parts, log),
        nodes=2,
        ledger=tmp_path / "ledger",
        settings=SETTINGS,
        node_options={"num_cpus": 0.1},
        service_options={"scheduling_strategy": here},
    ) as rollouts:
        with contextlib.suppress(EndOfData):
            while True:
                batch = rollouts.next_batch(3, timeout=60)
                assert all(len(group.trajectories) == SAMPLES for group in ray.get(list(batch.groups)))
                batch.ack()
                ids += [group.prompt for group in batch.ids]
                if len(ids) == 9:
                    cluster.remove_node(cluster.doomed, allow_graceful=False)
                    begun = time.monotonic()
        counts = rollouts.statistics()
    assert time.monotonic() - begun < 60  # not the time it takes Ray by itself to give up what was lost
    assert sorted(ids) == sorted(f"p{number}" for number in range(GROUPS))
    assert (counts.acked, counts.quarantined, counts.running) == (GROUPS, 0, 0)
    lost = counts.retries[Cause.INFRASTRUCTURE]
    assert 0 < lost <= SETTINGS.max_running
    assert (sum(counts.retries.values()), sum(counts.requeues.values())) == (lost, 0)
    assert counts.tokens.delivered == GROUPS * SAMPLES * TURNS * 4
    again = {sample: turns for sample, turns in turns_of(log).items() if len(turns) > TURNS}
    assert 0 < len(again) <= lost
    for turns in again.values():
        assert {node for node, attempt, _ in turns if attempt == 1} == {cluster.doomed.node_id}
        assert [number for _, attempt, number in turns if attempt == 2] == list(range(TURNS))
    assert len(turns_of(log)) == GROUPS * SAMPLES
