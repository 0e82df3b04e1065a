"""Starting the actors, and ending them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from trio_rollout._core.settings import EngineSettings
from trio_rollout.abc import GroupFilter, Source

from .._leasing._node import OpenParts
from ._actors import NodeActor, ServiceActor
from ._rollouts import RayRollouts


@contextmanager
def open_ray_rollouts(
    open_source: Callable[[], Source],
    open_parts: OpenParts,
    *,
    nodes: int,
    ledger: str | PathLike[str] | None = None,
    settings: EngineSettings | None = None,
    group_filter: GroupFilter | None = None,
    node_options: Mapping[str, Any] | None = None,
    service_options: Mapping[str, Any] | None = None,
) -> Generator[RayRollouts]:
    """Run rollouts on ``nodes`` actors until the block is left.

    ``open_parts`` is an async context manager function that each node calls: it gives what its engine is made of, and must be
    picklable, like ``open_source``. ``settings`` are those of one node; ``max_ready`` is that of the whole. ``ledger`` is a path
    that the service finds again wherever Ray restarts it; without it a service that dies is not restarted. ``node_options`` and
    ``service_options`` are Ray's actor options (``num_cpus``, ``resources``, ``scheduling_strategy``, …).

    Entering blocks until every node is ready. Leaving drains: at most ``Deadlines.drain`` for the service, then for the nodes.

    Raises:
      RayError: an actor could not be started; the cause says why.

    """
    settings = settings or EngineSettings()
    spread = {"max_restarts": -1, "scheduling_strategy": "SPREAD", "num_cpus": 1, **(node_options or {})}
    make_node = ray.remote(NodeActor).options(**{"max_concurrency": 2 * settings.max_running + 100, **spread})
    actors = [make_node.remote(open_parts, settings) for _ in range(nodes)]
    service = None
    try:
        ray.get([actor.adopt.remote("") for actor in actors])
        service = _start_service(actors, (open_source, settings, group_filter), ledger, service_options or {})
        rollouts = RayRollouts(service, ray.get(service.ask.remote(None, "hello")))
        yield rollouts
        rollouts._close()
        _end(actors)
    finally:
        for actor in [service, *actors]:
            if actor is not None:
                ray.kill(actor)


def _end(actors: Sequence[Any]) -> None:
    """Drain the nodes. One that is gone, or just being restarted, has nothing to drain."""
    for over in [actor.close.remote() for actor in actors]:
        with suppress(RayActorError):
            ray.get(over)


def _start_service(
    actors: Sequence[Any], parts: tuple[Any, Any, Any], ledger: str | PathLike[str] | None, options: Mapping[str, Any]
) -> Any:
    """The lease service over these nodes; Ray restarts it only where it has a ledger to go on from."""
    open_source, settings, group_filter = parts
    lasting = {"max_restarts": -1 if ledger is not None else 0, "num_cpus": 0, **options}
    named = [(f"node {number}", actor) for number, actor in enumerate(actors)]
    path = None if ledger is None else Path(ledger).absolute()
    return ray.remote(ServiceActor).options(**lasting).remote(named, open_source, settings, path, group_filter)
