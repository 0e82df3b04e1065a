"""The trainer's side: batches as Ray references, acked when its checkpoint is safe; and the actors' start and end.

``RayRollouts`` survives a restart of the lease service: it takes the batches again that it has not acked.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import attrs
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from trio_rollout import EngineSettings, EngineStatistics, GroupId, QuarantineReport
from trio_rollout.abc import GroupFilter, Source
from trio_rollout.errors import EngineClosed, RolloutError

from .._leasing._node import OpenParts, node_settings
from .._leasing._service import Head
from ._actors import NodeActor, ServiceActor, ServiceRestarted

_ASK_AGAIN_S: Final = 0.2
_LOSSES_OF_RAY: Final = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)


@final
@attrs.define(eq=False, repr=False)
class RayBatch:
    """Finished groups. ``groups`` has one Ray reference for each; a worker that trains on a group fetches it from its node.

    The references belong to the trainer: they stay valid when the lease service dies. ``step`` and ``redelivered``: see ``Batch``.
    """

    _rollouts: "RayRollouts"
    _head: Head
    groups: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"<RayBatch {self.step}: {len(self.groups)} groups>"

    @property
    def step(self) -> int:
        """Grows with each batch, across restarts."""
        return self._head.step

    @property
    def ids(self) -> tuple[GroupId, ...]:
        """The groups' ids, in order."""
        return self._head.ids

    @property
    def redelivered(self) -> bool:
        """True if some of its groups were delivered before, to a trainer that is gone."""
        return self._head.redelivered

    @property
    def statistics(self) -> EngineStatistics:
        """The lease service's counts at the moment of delivery."""
        return self._head.statistics

    def ack(self) -> None:
        """Say that no restart will ever go back before this batch. Blocks until that is in the ledger.

        Raises:
          RolloutError: the batch was acked before.
        """
        self._rollouts._ack(self)


@final
@attrs.define(eq=False, repr=False)
class RayRollouts:
    """Made by ``open_ray_rollouts``. One thread at a time may use it."""

    _service: Any
    _holder: str = ""
    _held: dict[str, Head] = attrs.field(factory=dict, init=False)
    """Batches that the trainer has not acked, by the id that it knows; the head has the service's present id."""
    _acking: str = attrs.field(default="", init=False)
    """The batch whose ack is under way: if the service dies now, its ledger knows if the ack has arrived."""
    _gone: bool = attrs.field(default=False, init=False)
    """The service is gone for good, and the trainer was told."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def next_batch(self, size: int, *, timeout: float | None = None) -> RayBatch:
        """Wait for ``size`` finished groups and take them; at the end of data there may be fewer.

        Raises:
          TimeoutError: fewer were finished after ``timeout`` seconds; nothing was taken.
          EndOfData: every group was delivered, filtered or quarantined.
          ServerError: every node is gone for good.
          EngineClosed: the lease service is gone, and has no ledger to go on from.
        """
        with self._lock:
            head, refs = self._settled(lambda: self._take(size, timeout))
            self._held[head.id] = head
        return RayBatch(self, head, refs[: len(head.ids)])

    def statistics(self) -> EngineStatistics:
        """Return the lease service's counts; samples that are lent count as running."""
        counts: EngineStatistics = self._ask("statistics")[0]
        return counts

    def nodes(self) -> Sequence[str]:
        """Return the names of the nodes that can be used now."""
        names: Sequence[str] = self._ask("statistics")[1]
        return names

    def quarantined(self) -> Sequence[QuarantineReport]:
        """Return the reports of groups that were given up."""
        reports: Sequence[QuarantineReport] = self._ask("quarantined")
        return reports

    def note_weight_version(self, version: int) -> None:
        """Say which weight version the servers have now: staleness is counted from it."""
        self._ask("note_weight_version", version)

    def _ack(self, batch: RayBatch) -> None:
        with self._lock:
            if batch._head.id not in self._held:
                raise RolloutError(f"ack of {batch!r}: it is acked already")
            self._acking = batch._head.id
            self._settled(self._ack_now)
            self._held.pop(self._acking, None)
            self._acking = ""

    def _ack_now(self) -> None:
        if self._acking in self._held:
            self._call("ack", self._held[self._acking].id)

    def _ask(self, name: str, *args: Any) -> Any:
        with self._lock:
            return self._settled(lambda: self._call(name, *args))

    def _call(self, name: str, *args: Any) -> Any:
        return ray.get(self._service.ask.remote(self._holder, name, *args))

    def _take(self, size: int, timeout: float | None) -> tuple[Head, tuple[Any, ...]]:
        first, *refs = self._service.next_batch.options(num_returns=size + 1).remote(self._holder, size, timeout)
        try:
            head: Head | Exception = ray.get(first)
        except KeyboardInterrupt:
            ray.cancel(first)
            raise
        if isinstance(head, Exception):
            raise head
        return head, tuple(refs)

    def _settled(self, ask: Any) -> Any:
        """Ask until the service answers. After a restart, first take the batches again that this trainer has not acked."""
        while True:
            try:
                return ask()
            except ServiceRestarted:
                pass
            except RayTaskError as error:
                if not isinstance(error.cause, ServiceRestarted):
                    raise error.cause from None
            except (ActorUnavailableError, ActorDiedError) as error:
                self._require_restart(error)
            self._holder = self._hello()
            self._take_again()

    def _close(self) -> None:
        """Have the service drain, unless it is gone."""
        with self._lock:
            if not self._gone:
                self._settled(lambda: ray.get(self._service.close.remote()))

    def _require_restart(self, error: Exception) -> None:
        if isinstance(error, ActorDiedError):
            self._gone = True
            raise EngineClosed(f"the lease service is gone: {error}") from error

    def _hello(self) -> str:
        """Return the service's present name; wait while it is being restarted."""
        while True:
            try:
                name: str = ray.get(self._service.ask.remote(None, "hello"))
            except ActorUnavailableError:
                threading.Event().wait(_ASK_AGAIN_S)
            except RayTaskError as error:
                raise error.cause from None
            except ActorDiedError as error:
                self._require_restart(error)
            else:
                return name

    def _take_again(self) -> None:
        """Take the batches again that a restarted service offers first, because they were not acked: this trainer has them."""
        for known, before in list(self._held.items()):
            if known == self._acking and not self._call("offers", before.ids):
                del self._held[known]  # the ack had arrived
                continue
            head, _ = self._take(len(before.ids), None)
            if set(head.ids) != set(before.ids):
                raise RolloutError(
                    f"the lease service was restarted and offers other groups than those of batch {before.step}; go back to your "
                    "last checkpoint and start again"
                )
            self._held[known] = head


def settings_on_ray(settings: EngineSettings) -> EngineSettings:
    """Return the settings for user code that uses Ray itself: what Ray loses with a machine or a worker is infrastructure.

    Raises:
      SettingsError: a node can't have these settings.
    """
    node_settings(settings)
    names = (*settings.retry.infrastructure, *_LOSSES_OF_RAY)
    return attrs.evolve(settings, retry=attrs.evolve(settings.retry, infrastructure=names))


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

    ``open_parts`` is an async context manager function that each node calls; it yields the parts of its engine, and must be
    picklable, like ``open_source``. ``settings`` are those of one node, except ``max_ready``, which holds for all together.
    ``ledger`` is a path that exists on every node on which Ray may restart the service; without it a service that dies is not restarted. ``node_options`` and
    ``service_options`` are Ray's actor options (``num_cpus``, ``resources``, ``scheduling_strategy``, …).

    Entering blocks until every node is ready. Leaving drains: at most ``Deadlines.drain`` for the service, then for the nodes.

    Raises:
      SettingsError, RayError: ``settings`` want turns recorded; an actor could not be started, the cause says why.
    """
    settings = settings_on_ray(settings or EngineSettings())
    spread = {"max_restarts": -1, "scheduling_strategy": "SPREAD", "num_cpus": 1, **(node_options or {})}
    calls = 2 * settings.max_running + settings.max_ready + 100
    make_node = ray.remote(NodeActor).options(**{"max_concurrency": calls, **spread})
    actors = [make_node.remote(open_parts, settings) for _ in range(nodes)]
    service = None
    try:
        parts = {"settings": settings, "group_filter": group_filter}
        service = _start_service(actors, open_source, parts, ledger, service_options or {})
        rollouts = RayRollouts(service, ray.get(service.ask.remote(None, "hello")))
        yield rollouts
        rollouts._close()
        _end(actors)
    finally:
        for actor in [service, *actors]:
            if actor is not None:
                ray.kill(actor)


def _end(actors: Sequence[Any]) -> None:
    """Drain the nodes. A node that is gone, or just being restarted, has nothing to drain."""
    for over in [actor.close.remote() for actor in actors]:
        with suppress(RayActorError):
            ray.get(over)


def _start_service(
    actors: Sequence[Any],
    open_source: Callable[[], Source],
    parts: Mapping[str, Any],
    ledger: str | PathLike[str] | None,
    options: Mapping[str, Any],
) -> Any:
    """Start the lease service over these nodes, once they are ready. Ray restarts it only if it has a ledger to go on from."""
    samples, groups = map(any, zip(*ray.get([actor.adopt.remote("") for actor in actors]), strict=True))
    lasting = {"max_restarts": 0 if ledger is None else -1, "num_cpus": 0, **options}
    named = [(f"node {number}", actor) for number, actor in enumerate(actors)]
    path = None if ledger is None else Path(ledger).absolute()
    make = ray.remote(ServiceActor).options(**lasting)
    return make.remote(named, open_source, ledger=path, scores_samples=samples, scores_groups=groups, **parts)
