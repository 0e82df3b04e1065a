"""Servers whose weights belong to the host: a trainer that pauses, updates and resumes them without the engine."""

from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Final, final

import attrs

from trio_rollout import Deadlines, PauseMode, Prompt, SamplingParams, ServerStatistics, Turn
from trio_rollout.abc import InferenceServers, ModelInput, OnTokens

_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


@final
@attrs.frozen(eq=False)
class HostServers:
    """The given servers, without the engine's requirement of a weight version; everything else is passed on.

    The host updates the weights and tells the engine afterwards, or never. Were a version required meanwhile, an updated
    server would get no more requests.
    """

    _servers: InferenceServers

    def under(self, deadlines: Deadlines) -> "HostServers":
        """Return the same servers, with these budgets."""
        return HostServers(self._servers.under(deadlines))

    def encode(self, prompt: Prompt) -> ModelInput:
        """See ``InferenceServers.encode``."""
        return self._servers.encode(prompt)

    def generate(  # returns the coroutine that does it: one less for each request in flight
        self,
        input_ids: ModelInput,
        sampling: SamplingParams,
        *,
        affinity: str | None = None,
        extra: Mapping[str, object] = _NOTHING,
        on_progress: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Coroutine[Any, Any, Turn]:
        """See ``InferenceServers.generate``."""
        return self._servers.generate(
            input_ids,
            sampling,
            affinity=affinity,
            extra=extra,
            on_progress=on_progress,
            on_tokens=on_tokens,
            while_waiting=while_waiting,
        )

    async def pause(self, mode: PauseMode) -> None:
        """See ``InferenceServers.pause``."""
        await self._servers.pause(mode)

    async def resume(self) -> None:
        """See ``InferenceServers.resume``."""
        await self._servers.resume()

    async def versions(self) -> Mapping[str, int | None]:
        """See ``InferenceServers.versions``."""
        return await self._servers.versions()

    def require_version(self, version: int, *, named_by: Collection[str] = ()) -> None:
        """Require nothing."""

    async def blocked_reason_after(self, known: str | None) -> str | None:
        """See ``InferenceServers.blocked_reason_after``."""
        return await self._servers.blocked_reason_after(known)

    def statistics(self) -> ServerStatistics:
        """See ``InferenceServers.statistics``."""
        return self._servers.statistics()
