"""Asyncio generate functions and scorers for the engine. Deadlines, aborts, requeues and drains hold for them, too."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, final

import attrs
import trio

from trio_rollout import Group, Prompt, SamplingParams, Status, Trajectory, Turn
from trio_rollout.abc import ModelInput, Rollout
from trio_rollout.tools import RolloutTools

from .bridge import Bridge, Portal

Item = TypeVar("Item", Trajectory, Group)
Score = TypeVar("Score")


@final
@attrs.define(eq=False, repr=False)
class AsyncioRollout:
    """``trio_rollout.abc.Rollout`` for an asyncio generate function, which awaits its methods on the loop's thread.

    ``deadline`` is on the clock of the running loop, for ``asyncio.timeout_at``. ``portal.run(fn, *args)`` runs any Trio function
    inside the rollout's scopes.
    """

    _rollout: Rollout
    portal: Portal
    deadline: float

    @property
    def attempt(self) -> int:
        """Number of this try at the group, from 1."""
        return self._rollout.attempt

    @property
    def index(self) -> int:
        """Place of this rollout in its group, from 0."""
        return self._rollout.index

    @property
    def weight_version(self) -> int:
        """The engine's newest weight version."""
        return self._rollout.weight_version

    @property
    def replaying(self) -> bool:
        """True while recorded turns are left that ``generate`` gives back; see ``trio_rollout.abc.Rollout.replaying``."""
        return self._rollout.replaying

    @property
    def input(self) -> ModelInput:
        """The prompt as the servers take it."""
        return self._rollout.input

    @property
    def tools(self) -> RolloutTools:
        """The rollout's tools, for Trio's thread: ``await rollout.portal.run(rollout.tools.run_captured, ["ls"])``."""
        return self._rollout.tools

    async def generate(
        self,
        input_ids: ModelInput,
        sampling: SamplingParams | None = None,
        *,
        extra: Mapping[str, object] | None = None,
    ) -> Turn:
        """Sample one turn through the engine's own client; see ``trio_rollout.abc.Rollout.generate``.

        Blocks the asyncio task until the answer is complete. Cancelled, the request is aborted on its server before
        CancelledError goes on. An interrupted turn cancels the task as well: the attempt is over.

        Raises:
          RequestRejected: the request's fault.
          ServerError: the server's fault.
        """

        async def ask() -> Turn:
            return await self._rollout.generate(input_ids, sampling, extra=extra or {})

        return await self.portal.run(ask)

    def finish(self, turns: Sequence[Turn], *, status: Status | None = None) -> Trajectory:
        """Return the trajectory of these turns; the status follows the last turn's stop unless given."""
        return self._rollout.finish(turns, status=status)


class AsyncioGenerateFunction(Protocol):
    """An asyncio generate function."""

    def __call__(self, prompt: Prompt, rollout: AsyncioRollout, /) -> Awaitable[Trajectory]:
        """Run one rollout of ``prompt``."""
        ...


@final
@attrs.frozen(eq=False)
class AsyncioGenerate:
    """On Trio's thread: the engine's generate function over an asyncio one. Made by ``asyncio_generate``."""

    _fn: AsyncioGenerateFunction
    _bridge: Bridge = attrs.field(repr=False)
    sampling: SamplingParams

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Run one rollout of ``prompt`` on the bridge's loop. Cancelled, it ends as ``Bridge.call`` says."""
        left = rollout.deadline - trio.current_time()

        async def run(portal: Portal) -> Trajectory:
            deadline = asyncio.get_running_loop().time() + left
            return await self._fn(prompt, AsyncioRollout(rollout, portal, deadline))

        run.__module__, run.__qualname__ = _name(self._fn)
        return await self._bridge.call_with_portal(run)


def asyncio_generate(
    fn: AsyncioGenerateFunction, *, bridge: Bridge, sampling: SamplingParams | None = None
) -> AsyncioGenerate:
    """Make an asyncio function ``fn(prompt, rollout)`` a generate function for the engine.

    ``rollout`` is an ``AsyncioRollout``. ``sampling`` is the default of its turns. The bridge must be open as long as the engine.
    """
    return AsyncioGenerate(fn, bridge, sampling or SamplingParams())


def asyncio_reward(fn: Callable[[Item], Awaitable[Score]], *, bridge: Bridge) -> Callable[[Item], Awaitable[Score]]:
    """Make an asyncio scorer of trajectories or groups, or a filter, one for the engine. The bridge must outlive the engine."""
    return bridge.wrap(fn)


def _name(fn: Any) -> tuple[str, str]:
    from_type = type(fn)
    return getattr(fn, "__module__", from_type.__module__), getattr(fn, "__qualname__", from_type.__qualname__)
