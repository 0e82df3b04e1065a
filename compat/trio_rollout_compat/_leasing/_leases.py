"""Lending groups to nodes: which node has room, which groups are lent, and how a node that is gone comes back.

A ``Lease`` travels to a node, ``Settled`` comes back. The service knows a node as a ``Worker``, which may be anything that can
run a lease. A place on a node is taken for as long as the node works on the lease, even when the result is no longer
wanted; otherwise the node would get more than it can run.
"""

import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeVar, final

import attrs
import trio

from trio_rollout import Cause, Failure, Prompt, Trajectory
from trio_rollout.errors import GenerateError, ServerError, ServerLost
from trio_rollout.lowlevel import Condition, open_service_nursery


@attrs.frozen(kw_only=True)
class Lease:
    """A group that a node is to run.

    ``holder`` names the service that lent it, a new name after each restart; ``number`` is unique for that holder.
    """

    holder: str
    number: int
    prompt: Prompt

    def __str__(self) -> str:
        return f"lease {self.number} of group {self.prompt.group_id}"


@attrs.frozen(kw_only=True)
class Settled:
    """The outcome of a lease on its node: the group's trajectories, or the failure that ended it."""

    rows: tuple[Trajectory, ...] = ()
    failure: Failure | None = None


_log: Final = logging.getLogger("trio_rollout.compat")

T = TypeVar("T")


class Worker(Protocol):
    """A node, as the lease service uses it. All methods are called by tasks of the service's Trio run."""

    @property
    def name(self) -> str:
        """The node's name in messages."""
        ...

    async def run(self, lease: Lease) -> Settled:
        """Run a group on the node and return its outcome. Blocks until then.

        Never cancelled while the service is open: a lease that is no longer wanted is revoked.

        Raises:
          ServerLost: the node is gone, and the lease with it.
        """
        ...

    def revoke(self, lease: Lease) -> None:
        """Tell the node that the result is no longer wanted, so that its ``run`` ends soon. Does not block."""

    async def returned(self, holder: str) -> bool:
        """Wait until the node can be used; return False if it is gone for good. Called at the start and after ServerLost."""
        ...


@final
@attrs.define(eq=False)
class _Place:
    """A node that can be used, and how many more groups it can run."""

    worker: Worker
    free: int


@final
@attrs.define(eq=False)
class LentGroup:
    """One group that is lent, until its node is done with it."""

    lease: Lease
    over: trio.Event = attrs.field(factory=trio.Event, init=False)
    settled: Settled = attrs.field(factory=Settled, init=False)
    lost: ServerLost | None = attrs.field(default=None, init=False)

    def rows(self) -> tuple[Trajectory, ...]:
        """Return the trajectories. A ServerLost lets the engine try again, which lends the group once more.

        Raises:
          ServerLost: the node is gone, or its servers are, or it was closed.
          GenerateError: the node has given the group up.
        """
        failure = self.settled.failure
        if self.lost is not None:
            raise ServerLost(f"{self.lease}: {self.lost}") from self.lost
        if failure is None:
            return self.settled.rows
        kind = ServerLost if failure.cause in {Cause.SERVER_LOST, Cause.SERVER_ABORT, Cause.SHUTDOWN} else GenerateError
        raise kind(f"{self.lease} was given up by its node: {failure}\n{failure.traceback}".rstrip())


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Leases:
    """The leases of one service. Made by ``open_leases``.

    ``capacity``: groups at once on each node. ``cleanup_s``: seconds that a revoked lease is waited for.
    """

    holder: str
    capacity: int
    cleanup_s: float
    _nursery: trio.Nursery = attrs.field(alias="nursery")
    _changed: Condition = attrs.field(factory=Condition, init=False)
    _places: list[_Place] = attrs.field(factory=list, init=False)
    _absent: int = attrs.field(default=0, init=False)
    _last_loss: str = attrs.field(default="", init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    @property
    def out(self) -> int:
        """Number of groups that are lent."""
        return sum(self.capacity - place.free for place in self._places)

    @property
    def nodes(self) -> Sequence[str]:
        """Names of the nodes that can be used now."""
        return [place.worker.name for place in self._places]

    async def lend(self, prompt: Prompt) -> tuple[Trajectory, ...]:
        """Run this group on some node, and return its trajectories.

        Blocks until a node has room, then until it is done. Cancelled, the lease is revoked, and its end awaited for
        ``cleanup_s`` seconds before Cancelled goes on.

        Raises:
          ServerLost: the node is gone, or has lost its servers; another node may try.
          GenerateError: the node has given the group up; the message says why.
        """
        await self._changed.wait_until(lambda: any(place.free > 0 for place in self._places))
        place = max(self._places, key=lambda place: place.free)
        place.free -= 1
        lent = LentGroup(Lease(holder=self.holder, number=next(self._numbers), prompt=prompt))
        self._nursery.start_soon(self._run, place, lent, name=f"{lent.lease} on {place.worker.name}")
        try:
            await lent.over.wait()
        except trio.Cancelled:
            place.worker.revoke(lent.lease)
            with trio.move_on_after(self.cleanup_s, shield=True):
                await lent.over.wait()
            raise
        return lent.rows()

    async def unless_all_are_gone(self, fn: Callable[[], Awaitable[T]]) -> T:
        """Await ``fn()``, and cancel it when every node is gone for good.

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
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if not made:
            raise ServerError(f"every node is gone for good. The last one: {self._last_loss}")
        return made[0]

    async def _cancel_when_all_are_gone(self, scope: trio.CancelScope) -> None:
        await self._changed.wait_until(lambda: not self._places and not self._absent)
        scope.cancel(reason="every node is gone")

    async def _run(self, place: _Place, lent: LentGroup) -> None:
        try:
            lent.settled = await place.worker.run(lent.lease)
        except ServerLost as error:
            lent.lost = error
            self._note_gone(place, error)
        finally:
            place.free += 1
            lent.over.set()
            self._changed.notify()

    def _note_gone(self, place: _Place, error: ServerLost) -> None:
        if place not in self._places:
            return  # another of its leases was the first to know
        self._places.remove(place)
        self._last_loss = str(error)
        _log.warning("node %s is gone; the groups it was lent run elsewhere: %s", place.worker.name, error)
        self.expect(place.worker)

    def expect(self, worker: Worker) -> None:
        """Lend to this node as soon as it can be used."""
        self._absent += 1
        self._nursery.start_soon(self._await_return, worker, name=f"await node {worker.name}")

    async def _await_return(self, worker: Worker) -> None:
        try:
            if await worker.returned(self.holder):
                self._places.append(_Place(worker, self.capacity))
            else:
                _log.error("node %s is gone for good", worker.name)
        finally:
            self._absent -= 1
            self._changed.notify()


@asynccontextmanager
async def open_leases(
    workers: Sequence[Worker], *, holder: str, capacity: int, cleanup_s: float
) -> AsyncGenerator[Leases]:
    """Lend groups to these nodes, ``capacity`` at once to each, until the block is left."""

    async with open_service_nursery() as nursery:
        leases = Leases(holder=holder, capacity=capacity, cleanup_s=cleanup_s, nursery=nursery)
        for worker in workers:
            leases.expect(worker)
        yield leases
