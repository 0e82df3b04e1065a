"""The two Ray actors, and a node's actor as a worker of the lease service. Each actor has an EngineThread."""

import functools
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import starmap
from typing import Any, Final, final

import attrs
import ray
import trio
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from trio_rollout import EngineSettings
from trio_rollout.abc import Source
from trio_rollout.errors import EndOfData, EngineClosed
from trio_rollout.lowlevel import wait_s

from .._leasing._leases import Lease, NodeLost, Settled
from .._leasing._node import OpenParts, open_node
from .._leasing._service import open_lease_service
from ..bridge._backends import replies_to
from ..thread import EngineThread

# Ray says when an actor is gone, but not when it is back: the service has to ask.
_ASK_AGAIN_S: Final = 0.5


async def await_ray(ref: Any) -> Any:
    """Wait in Trio for a Ray reference, and return its value. Cancelled, the remote task goes on.

    Raises:
      RayError: the task failed, or its actor did.
    """
    done = trio.Event()
    reply = replies_to(trio.lowlevel.current_trio_token())
    future = ref.future()
    future.add_done_callback(lambda _: reply(done.set))
    await done.wait()
    return future.result()


@final
class NodeActor:
    """The actor of one node's engine. Ray makes it, and makes it again when its node is gone."""

    def __init__(self, open_parts: OpenParts, settings: EngineSettings) -> None:
        grace = settings.deadlines.drain + settings.deadlines.control
        lifespan = functools.partial(open_node, open_parts, settings)
        self._thread = EngineThread(lifespan, name="trio-rollout node", grace=grace).start()

    async def adopt(self, holder: str) -> tuple[bool, bool]:
        """Accept leases of this holder, revoke those of the service before it was restarted.

        Return two facts of the node: it has a reward, and it has a group reward.
        """
        await self._thread.acall(_later, functools.partial(self._thread.value.adopt, holder))
        parts = self._thread.value.parts
        return parts.reward is not None, parts.group_reward is not None

    async def run(self, lease: Lease) -> Settled:
        """Run a lease and return its outcome."""
        return await self._thread.acall(self._thread.value.run, lease)

    async def revoke(self, holder: str, number: int) -> None:
        """Revoke a lease whose result is no longer wanted."""
        await self._thread.acall(_later, functools.partial(self._thread.value.revoke, holder, number))

    async def close(self) -> None:
        """Drain the engine and end its thread."""
        await self._thread.aclose(self._thread.grace)


@final
class ServiceActor:
    """The actor of the lease service. Restarted by Ray, it goes on from its ledger."""

    def __init__(
        self,
        nodes: Sequence[tuple[str, Any]],
        open_source: Callable[[], Source],
        *,
        settings: EngineSettings,
        **more: Any,
    ) -> None:
        """``more``: see ``open_lease_service``."""
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] = functools.partial(
            open_lease_service,
            list(starmap(RayWorker, nodes)),
            open_source,
            settings=settings,
            holder=uuid.uuid4().hex,
            **more,
        )
        grace = settings.deadlines.drain + settings.deadlines.control
        self._thread = EngineThread(lifespan, name="trio-rollout lease service", grace=grace).start()

    async def ask(self, holder: str | None, name: str, *args: Any) -> Any:
        """Call a method of the service.

        Raises:
          ServiceRestarted: ``holder`` is the name from before a restart.
        """
        service = self._thread.value
        if holder not in {None, service.holder}:
            raise ServiceRestarted(service.holder)
        return await self._thread.acall(getattr(service, name), *args)

    async def next_batch(self, holder: str, size: int, timeout: float | None) -> Any:  # noqa: ASYNC109  the trainer's
        """Return ``size + 1`` values, so that each gets a separate reference: the head, the groups, then None.

        An exception that ends a trainer's loop comes in the head's place: Ray logs an error for each reference of a failed task
        that is never read.
        """
        try:
            head, groups = await self.ask(holder, "next_batch", size, timeout)
        except (EndOfData, TimeoutError, ServiceRestarted) as error:
            return (error, *[None] * size)
        return (head, *groups, *[None] * (size - len(groups)))

    async def close(self) -> None:
        """Drain, within ``Deadlines.drain``."""
        await self._thread.aclose(self._thread.grace)


class ServiceRestarted(Exception):
    """The lease service was restarted; the argument is its new name."""


@final
@attrs.frozen(eq=False)
class RayWorker:
    """A node's actor as a ``Worker`` of the lease service."""

    name: str
    _actor: Any = attrs.field(repr=False)

    async def run(self, lease: Lease) -> Settled:
        """See ``Worker.run``."""
        try:
            settled: Settled = await await_ray(self._actor.run.remote(lease))
        except RayTaskError as error:
            if isinstance(error.cause, EngineClosed):  # the engine has crashed, and the actor goes on without it
                ray.kill(self._actor, no_restart=False)
            raise NodeLost(f"its engine failed: {error.cause!r}") from error
        except RayError as error:
            raise NodeLost(f"{type(error).__name__}: {error}") from error
        return settled

    def revoke(self, lease: Lease) -> None:
        """See ``Worker.revoke``."""
        self._actor.revoke.remote(lease.holder, lease.number)

    async def returned(self, holder: str) -> bool:
        """See ``Worker.returned``."""
        while True:  # noqa: ASYNC913  every way through it awaits Ray
            try:
                await await_ray(self._actor.adopt.remote(holder))
            except ActorUnavailableError:
                await wait_s(_ASK_AGAIN_S)
            except (ActorDiedError, RayActorError, RayTaskError):
                return False
            else:
                return True


async def _later(fn: Callable[[], None]) -> None:
    await trio.lowlevel.checkpoint()
    fn()
