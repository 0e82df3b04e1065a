"""A Ray cluster of two machines (two raylets on this one), one of which dies with everything on it: each group exactly once."""

import functools
import sys
import time

import pytest

from trio_rollout import Cause, Deadlines, EngineSettings, IterableSource, Prompt
from trio_rollout.errors import EndOfData

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("default"),  # Ray's own are many
]

GROUPS = 60
SETTINGS = EngineSettings(samples_per_prompt=2, max_running=8, max_ready=6, deadlines=Deadlines(group=60, drain=10))
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


def number_of(node):
    """A Ray node's id as a reward."""
    return float(int(node[:8], 16))


def parts(number_of):
    """Fake servers on each node; a group's reward is the node that it ran on."""
    from contextlib import asynccontextmanager

    import ray

    from trio_rollout import SingleTurn
    from trio_rollout.testing import FakeServers, Say
    from trio_rollout_compat.ray import NodeParts

    where = number_of(ray.get_runtime_context().get_node_id())

    async def reward(trajectory):
        return where

    @asynccontextmanager
    async def parts():
        servers = FakeServers(plan=lambda number, prompt: Say(seconds=0.2))
        yield NodeParts(generate=SingleTurn(), servers=servers, reward=reward)

    return parts()


def taken(rollouts, ray, count):
    """Take so many batches; return the prompts, and the nodes they ran on."""
    ids, places = [], []
    for _ in range(count):
        batch = rollouts.next_batch(3, timeout=60)
        groups = ray.get(list(batch.groups))
        batch.ack()
        ids += [group.prompt.id for group in groups]
        places += [row.reward for group in groups for row in group.trajectories]
    return ids, places


def test_a_machine_that_dies_costs_no_group(cluster, tmp_path):
    """Its engine is started again on the other one; the groups it was lent run elsewhere."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trio_rollout_compat.ray import open_ray_rollouts

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    doomed = number_of(cluster.doomed.node_id)
    with open_ray_rollouts(
        source,
        functools.partial(parts, number_of),
        nodes=2,
        ledger=tmp_path / "ledger",
        settings=SETTINGS,
        node_options={"num_cpus": 0.1},
        service_options={"scheduling_strategy": here},
    ) as rollouts:
        ids, places = taken(rollouts, ray, 4)
        assert doomed in places
        cluster.remove_node(cluster.doomed, allow_graceful=False)
        begun = time.monotonic()
        while True:
            try:
                more, places = taken(rollouts, ray, 1)
            except EndOfData:
                break
            ids += more
        counts = rollouts.statistics()
    assert sorted(ids) == sorted(f"p{number}" for number in range(GROUPS))
    assert (counts.acked, counts.quarantined, counts.running) == (GROUPS, 0, 0)
    assert counts.retries[Cause.SERVER_LOST] > 0
    assert time.monotonic() - begun < 60  # not the time it takes Ray by itself to give up what was lost
