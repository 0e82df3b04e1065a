"""Lending samples to nodes: which node has room, which samples are lent, and how a node that is gone comes back.

A ``Lease`` travels to a node, ``Settled`` comes back. The service knows a node as a ``Worker``, which may be anything that can
run a lease. A place on a node is taken for as long as the node works on the lease, even when the result is no longer
wanted; otherwise the node would get more than it can run.
"""

import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeVar, final

import attrs
import trio

from trio_rollout import Cause, Failure, Group, GroupId, Prompt, Trajectory
from trio_rollout.errors import FailedElsewhere, InfrastructureError, ServerError
from trio_rollout.lowlevel import Condition, open_service_nursery

_log: Final = logging.getLogger("trio_rollout.compat")
_OF_THE_NODE: Final = frozenset({Cause.INFRASTRUCTURE, Cause.SERVER_LOST})

T = TypeVar("T")


class NodeLost(InfrastructureError):
    """A node is gone, and with it the samples that it was running. They run elsewhere, and use up no try."""


@attrs.frozen(kw_only=True)
class Lease:
    """One try at one sample of a group, for a node to run; or, with ``sampled``, something that a node is only to score.

    ``sampled`` is a trajectory that lacks a reward, or a finished group that is to get its group reward. ``holder`` names the service that lent it, a new name after each restart; ``number`` is unique for that holder.
    ``attempt`` is the number of the try, from 1.
    """

    holder: str
    number: int
    prompt: Prompt
    index: int = 0
    attempt: int = 1
    sampled: Trajectory | Group | None = None

    def __str__(self) -> str:
        what = "group reward" if isinstance(self.sampled, Group) else f"sample {self.index}"
        return f"lease {self.number} of group {self.prompt.group_id}, {what}"

    def at_home(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with the prompt and the index that it has for the service."""
        return attrs.evolve(trajectory, prompt=self.prompt, index=self.index)


@attrs.frozen(kw_only=True)
class Settled:
    """The outcome of a lease on its node: a scored trajectory, or a scorer's answer, or a failure.

    With a failure and a trajectory only the reward is missing. ``permanent``: no other try can end differently, because no
    server takes the input, or the scorer has failed for good. ``tokens`` is the number of tokens that were sampled.
    """

    trajectory: Trajectory | None = None
    score: object = None
    failure: Failure | None = None
    permanent: bool = False
    tokens: int = 0

    def raise_failure(self) -> None:
        """Raise what the engine of the service is to count, if the lease failed on its node.

        Raises:
          FailedElsewhere: the lease failed.
        """
        if self.failure is not None:
            raise FailedElsewhere(
                str(self.failure), failure=self.failure, unscored=self.trajectory, permanent=self.permanent
            )


class Worker(Protocol):
    """A node, as the lease service uses it. All methods are called by tasks of the service's Trio run."""

    @property
    def name(self) -> str:
        """The node's name in messages."""
        ...

    async def run(self, lease: Lease) -> Settled:
        """Run a lease on the node and return its outcome. Blocks until then.

        Never cancelled while the service is open: a lease that is no longer wanted is revoked.

        Raises:
          NodeLost: the node is gone, and the lease with it.
        """
        ...

    def revoke(self, lease: Lease) -> None:
        """Tell the node that the result is no longer wanted, so that its ``run`` ends soon. Does not block."""

    async def returned(self, holder: str) -> bool:
        """Wait until the node can be used; return False if it is gone for good. Called at the start and after NodeLost."""
        ...


@final
@attrs.define(eq=False)
class _Place:
    """A node that can be used, how many more samples it can run, and the groups of those that it runs.

    ``fails``: the last sample that ended there had lost a server, a sandbox, or the like.
    """

    worker: Worker
    free: int
    groups: Counter[GroupId] = attrs.field(factory=Counter, init=False)
    fails: bool = attrs.field(default=False, init=False)

    def take(self, gid: GroupId) -> None:
        self.free -= 1
        self.groups[gid] += 1

    def give_back(self, gid: GroupId, settled: Settled) -> None:
        self.free += 1
        self.groups[gid] -= 1
        self.groups += Counter()  # leaves out the groups of which nothing runs here
        self.fails = settled.failure is not None and settled.failure.cause in _OF_THE_NODE


@final
@attrs.define(eq=False)
class _Lent:
    """One lease, until its node is done with it."""

    lease: Lease
    over: trio.Event = attrs.field(factory=trio.Event, init=False)
    settled: Settled = attrs.field(factory=Settled, init=False)
    lost: NodeLost | None = attrs.field(default=None, init=False)


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Leases:
    """The leases of one service. Made by ``open_leases``.

    ``capacity``: samples at once on each node. ``cleanup_s``: seconds that a revoked lease is waited for.
    """

    holder: str
    capacity: int
    cleanup_s: float
    _nursery: trio.Nursery = attrs.field(alias="nursery")
    _changed: Condition = attrs.field(factory=Condition, init=False)
    _without_room: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _places: list[_Place] = attrs.field(factory=list, init=False)
    _absent: int = attrs.field(default=0, init=False)
    _last_loss: str = attrs.field(default="", init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    @property
    def out(self) -> int:
        """Number of samples that are lent."""
        return sum(self.capacity - place.free for place in self._places)

    @property
    def nodes(self) -> Sequence[str]:
        """Names of the nodes that can be used now."""
        return [place.worker.name for place in self._places]

    async def sample(self, prompt: Prompt, index: int, attempt: int, note_tokens: Callable[[int], None]) -> Settled:
        """Run one try at a sample on some node, and return its outcome.

        Siblings go to one node while it has room: they share the beginning of their requests. A node that lost the last
        sample's server or sandbox comes last. Blocks until a node has room, then until it is done. Cancelled, the lease is
        revoked, and its end awaited for ``cleanup_s`` seconds before Cancelled goes on.

        Raises:
          NodeLost: the node is gone; another node may try.
        """
        gid = prompt.group_id
        while not (having_room := [place for place in self._places if place.free > 0]):
            await self._without_room.park()
        place = max(having_room, key=lambda place: (not place.fails, gid in place.groups, place.free))
        number = next(self._numbers)
        lease = Lease(holder=self.holder, number=number, prompt=prompt, index=index, attempt=attempt)
        place.take(gid)

        def over(settled: Settled) -> None:  # also if the result is no longer wanted: its tokens were sampled
            place.give_back(gid, settled)
            note_tokens(settled.tokens)

        return await self._settled(place, lease, over)

    async def score(self, sampled: Trajectory | Group) -> Settled:
        """Have some node score this, and return the outcome. Needs no room there; otherwise like ``sample``.

        Raises:
          NodeLost: the node is gone, or no node can be used at the moment.
        """
        index = sampled.index if isinstance(sampled, Trajectory) else 0
        number, prompt = next(self._numbers), sampled.prompt
        lease = Lease(holder=self.holder, number=number, prompt=prompt, index=index, sampled=sampled)
        if not self._places:
            await trio.lowlevel.checkpoint()
            raise NodeLost(f"{lease}: no node can be used at the moment")
        place = max(self._places, key=lambda place: place.free)
        return await self._settled(place, lease, lambda _: None)

    async def _settled(self, place: _Place, lease: Lease, over: Callable[[Settled], None]) -> Settled:
        lent = _Lent(lease)
        self._nursery.start_soon(self._run, place, lent, over, name=f"{lease} on {place.worker.name}")
        try:
            await lent.over.wait()
        except trio.Cancelled:
            place.worker.revoke(lease)
            with trio.move_on_after(self.cleanup_s, shield=True):
                await lent.over.wait()
            raise
        if lent.lost is not None:
            raise NodeLost(f"{lease}: {lent.lost}") from lent.lost
        return lent.settled

    async def unless_all_are_gone(self, fn: Callable[[], Awaitable[T]]) -> T:
        """Await ``fn()``, and cancel it when every node is gone for good. Cancelled, ``fn`` is; what it has returned is not lost.

        Raises:
          ServerError: every node is gone for good.
        """
        made: list[T] = []
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_all_are_gone, nursery.cancel_scope)
            try:
                made.append(await fn())
            except Exception as error:  # ruff: ignore[blind-except]  raised again below, outside the nursery, as itself
                failure = error
            nursery.cancel_scope.shield = True  # the end of the watcher is no place for a cancellation
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if not made:
            raise ServerError(f"every node is gone for good. The last one: {self._last_loss}")
        return made[0]

    async def _cancel_when_all_are_gone(self, scope: trio.CancelScope) -> None:
        await self._changed.wait_until(lambda: not self._places and not self._absent)
        scope.cancel(reason="every node is gone")

    async def _run(self, place: _Place, lent: _Lent, over: Callable[[Settled], None]) -> None:
        try:
            lent.settled = await place.worker.run(lent.lease)
        except NodeLost as error:
            lent.lost = error
            self._note_gone(place, error)
        finally:
            over(lent.settled)
            lent.over.set()
            self._without_room.unpark()

    def _note_gone(self, place: _Place, error: NodeLost) -> None:
        if place not in self._places:
            return  # another of its leases was the first to know
        self._places.remove(place)
        self._last_loss = str(error)
        _log.warning("node %s is gone; the samples it was lent run elsewhere: %s", place.worker.name, error)
        self.expect(place.worker)

    def expect(self, worker: Worker) -> None:
        """Lend to this node as soon as it can be used."""
        self._absent += 1
        self._nursery.start_soon(self._await_return, worker, name=f"await node {worker.name}")

    async def _await_return(self, worker: Worker) -> None:
        try:
            if await worker.returned(self.holder):
                self._places.append(_Place(worker, self.capacity))
                self._without_room.unpark(count=self.capacity)
            else:
                _log.error("node %s is gone for good", worker.name)
        finally:
            self._absent -= 1
            self._changed.notify()


@asynccontextmanager
async def open_leases(
    workers: Sequence[Worker], *, holder: str, capacity: int, cleanup_s: float
) -> AsyncGenerator[Leases]:
    """Lend samples to these nodes, ``capacity`` at once to each, until the block is left."""

    async with open_service_nursery() as nursery:
        leases = Leases(holder=holder, capacity=capacity, cleanup_s=cleanup_s, nursery=nursery)
        for worker in workers:
            leases.expect(worker)
        yield leases
