"""What travels between the lease service and a node: a lease, and how it was settled.

Lending groups to nodes: who has room, what is out, what comes back from a node that is gone.

Owns the places of the nodes. A lease is out for as long as its node works on it, even when nobody wants its result any more: only
then its place is free. Knows nothing of Ray: a node is a ``Worker``.
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
    """A group that a node is to run. ``holder`` is the life of the service that lent it; ``number`` is unique within that."""

    holder: str
    number: int
    prompt: Prompt

    def __str__(self) -> str:
        return f"lease {self.number} of group {self.prompt.group_id}"


@attrs.frozen(kw_only=True)
class Settled:
    """A lease's end on its node: the group's trajectories, or why there are none."""

    rows: tuple[Trajectory, ...] = ()
    failure: Failure | None = None


_log: Final = logging.getLogger("trio_rollout.compat")

T = TypeVar("T")


class Worker(Protocol):
    """A node."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    async def run(self, lease: Lease) -> Settled:
        """Have the node run a group to its end.

        Raises:
          ServerLost: the node is gone, and the lease with it.

        """
        ...

    def revoke(self, lease: Lease) -> None:
        """Tell the node that nobody wants this any more: its ``run`` ends soon."""
        ...

    async def returned(self, holder: str) -> bool:
        """Wait until a node that was gone can be used; False: it never will."""
        ...


@final
@attrs.define(eq=False)
class _Place:
    """One life of a node: how many groups it may have, how many it has."""

    worker: Worker
    free: int


@final
@attrs.define(eq=False)
class _Errand:
    """One lease that is out."""

    lease: Lease
    over: trio.Event = attrs.field(factory=trio.Event, init=False)
    settled: Settled = attrs.field(factory=Settled, init=False)
    lost: ServerLost | None = attrs.field(default=None, init=False)

    def rows(self) -> tuple[Trajectory, ...]:
        """What came back. A lost lease, or one whose servers were lost, is the pool's to lend again."""
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
    """Made by ``open_leases``. ``wrap_up``: how long a lease that nobody wants any more is waited for."""

    holder: str
    capacity: int
    wrap_up: float
    _nursery: trio.Nursery = attrs.field(alias="nursery")
    _changed: Condition = attrs.field(factory=Condition, init=False)
    _places: list[_Place] = attrs.field(factory=list, init=False)
    _absent: int = attrs.field(default=0, init=False)
    _last_words: str = attrs.field(default="", init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    @property
    def out(self) -> int:
        """How many groups are lent."""
        return sum(self.capacity - place.free for place in self._places)

    @property
    def nodes(self) -> Sequence[str]:
        """Who can be lent to now."""
        return [place.worker.name for place in self._places]

    async def lend(self, prompt: Prompt) -> tuple[Trajectory, ...]:
        """Have some node run this group, and return its trajectories.

        Blocks until a node has room, then until it is done. Cancelled, the node is told, and its end awaited for ``wrap_up``
        seconds before Cancelled goes on.

        Raises:
          ServerLost: the node is gone, or has lost its servers: another one may try.
          GenerateError: the node has given it up; says why.

        """
        await self._changed.wait_until(lambda: any(place.free > 0 for place in self._places))
        place = max(self._places, key=lambda place: place.free)
        place.free -= 1
        errand = _Errand(Lease(holder=self.holder, number=next(self._numbers), prompt=prompt))
        self._nursery.start_soon(self._run, place, errand, name=f"{errand.lease} on {place.worker.name}")
        try:
            await errand.over.wait()
        except trio.Cancelled:
            place.worker.revoke(errand.lease)
            with trio.move_on_after(self.wrap_up, shield=True):
                await errand.over.wait()
            raise
        return errand.rows()

    async def unless_all_are_gone(self, fn: Callable[[], Awaitable[T]]) -> T:
        """Await ``fn()``, as long as there is a node, or one that may come back.

        Raises:
          ServerError: there is none.

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
            raise ServerError(f"every node is gone for good. The last one: {self._last_words}")
        return made[0]

    async def _cancel_when_all_are_gone(self, scope: trio.CancelScope) -> None:
        await self._changed.wait_until(lambda: not self._places and not self._absent)
        scope.cancel(reason="every node is gone")

    async def _run(self, place: _Place, errand: _Errand) -> None:
        try:
            errand.settled = await place.worker.run(errand.lease)
        except ServerLost as error:
            errand.lost = error
            self._note_gone(place, error)
        finally:
            place.free += 1
            errand.over.set()
            self._changed.notify()

    def _note_gone(self, place: _Place, error: ServerLost) -> None:
        if place not in self._places:
            return  # another of its leases was the first to know
        self._places.remove(place)
        self._last_words = str(error)
        _log.warning("node %s is gone; what it was lent runs elsewhere: %s", place.worker.name, error)
        self.expect(place.worker)

    def expect(self, worker: Worker) -> None:
        """Lend to this node as soon as it can be used."""
        self._absent += 1
        self._nursery.start_soon(self._await, worker, name=f"await node {worker.name}")

    async def _await(self, worker: Worker) -> None:
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
    workers: Sequence[Worker], *, holder: str, capacity: int, wrap_up: float
) -> AsyncGenerator[Leases]:
    """Lend groups to these nodes, ``capacity`` at once to each, until the block is left."""

    async with open_service_nursery() as nursery:
        leases = Leases(holder=holder, capacity=capacity, wrap_up=wrap_up, nursery=nursery)
        for worker in workers:
            leases.expect(worker)
        yield leases
