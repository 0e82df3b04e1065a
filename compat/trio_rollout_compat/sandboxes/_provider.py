"""A provider of the engine's sandboxes over slime's protocol.

The service that makes sandboxes is slow, and a creation goes on when the rollout that wanted it is cancelled. So each sandbox is
owned by a task of the provider, from ``__aenter__`` to ``__aexit__``, and not by the rollout: a cancelled rollout does not
wait for the creation, and a sandbox that is created after all is destroyed.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import final

import attrs
import trio

from trio_rollout.errors import ToolError
from trio_rollout.lowlevel import open_service
from trio_rollout.tools import NeverRan, SandboxCounts, SandboxSpec

from ..bridge import Bridge
from ._bridged import Access, BridgedSandbox, SlimeSandbox, never_ran


@final
@attrs.define(eq=False, repr=False)
class SlimeSandboxes:
    """A ``SandboxProvider`` of slime's sandboxes. Made by ``open_slime_sandboxes``."""

    _make: Callable[[SandboxSpec], SlimeSandbox]
    _access: Access
    _nursery: trio.Nursery
    counts: SandboxCounts = attrs.field(factory=SandboxCounts, init=False)
    _living: dict[str, BridgedSandbox] = attrs.field(factory=dict, init=False)

    async def create(self, spec: SandboxSpec) -> BridgedSandbox:
        """Make a sandbox and return it. Blocks until it is there. Cancelled, the creation goes on: destroy it by its name.

        Raises:
          ToolError: it could not be made; NeverRan if it certainly is not there.
        """
        sandbox = BridgedSandbox(spec, self._make(spec), self._access)
        self._living[spec.name] = sandbox
        self._nursery.start_soon(self._live, sandbox, name=f"sandbox {spec.name}")
        try:
            await sandbox.made()
        except NeverRan:
            del self._living[spec.name]
            raise
        return sandbox

    async def _live(self, sandbox: BridgedSandbox) -> None:
        failure: Exception | None = None
        try:
            await sandbox.live()
        except Exception as error:  # noqa: BLE001  raised to the code that waits for it
            failure = error
        finally:
            sandbox.end(failure)

    async def destroy(self, name: str) -> None:
        """Destroy a sandbox. Blocks until its ``__aexit__`` has returned. Cancelled, the destruction goes on.

        Raises:
          ToolError: the destruction failed; the sandbox may still be there.
        """
        await trio.lowlevel.checkpoint()
        sandbox = self._living.get(name)
        if sandbox is None:
            return
        sandbox.unwanted()
        if (error := await sandbox.gone()) is not None:
            raise ToolError(f"sandbox {name}: it may still be there: {error!r}") from error
        del self._living[name]

    async def sweep(self, label: str) -> int:
        """Destroy nothing: slime's protocol cannot list the sandboxes of earlier runs, so their lifetime has to end them."""
        del label
        await trio.lowlevel.checkpoint()
        return 0

    async def leave(self) -> None:
        """Wait for sandboxes that are still being made or destroyed, at most the bridge's grace."""
        with trio.move_on_after(self._access.bridge.settings.grace):
            for sandbox in self._living.values():
                sandbox.unwanted()
            for sandbox in list(self._living.values()):
                await sandbox.gone()


@asynccontextmanager
async def open_slime_sandboxes(
    make: Callable[[SandboxSpec], SlimeSandbox],
    *,
    bridge: Bridge,
    user: str = "root",
    never_ran: Callable[[Exception], bool] = never_ran,
) -> AsyncGenerator[SlimeSandboxes]:
    """Give the engine sandboxes that follow slime's protocol. Open it inside the bridge and around the engine.

    ``make(spec)`` builds one, not entered yet; ``spec.lifetime`` is for the service. ``never_ran(error)`` returns True
    if a request that failed like this certainly had no effect; only such a request is tried again. Commands run as ``user``.
    Leaving waits for sandboxes that are still being destroyed, within the bridge's grace.
    """

    async def serve(*, task_status: trio.TaskStatus[SlimeSandboxes]) -> None:
        async with trio.open_nursery() as nursery:
            provider = SlimeSandboxes(make, Access(bridge, user, never_ran), nursery)
            task_status.started(provider)
            await trio.sleep_forever()

    async with open_service(serve, lambda provider, _error: provider.leave()) as provider:
        yield provider
