"""Turn cancellation: it stops the tool calls of a turn, each of which then returns a value.

It is not a cancelled scope around the caller: a cancelled scope can't return a value to its own caller. So the cancellation is
linked into a scope inside each tool call.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import attrs
import trio


@final
@attrs.define(eq=False)
class TurnCancellation:
    """The cancellation of one turn. ``ExecLimits.on_turn_cancel`` says if the processes of exec sessions die with it."""

    reason: str | None = attrs.field(default=None, init=False)
    cancelled_at: float | None = attrs.field(default=None, init=False)
    _event: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _scopes: list[trio.CancelScope] = attrs.field(factory=list, init=False, repr=False)

    @property
    def cancelled(self) -> bool:
        """True once the turn is cancelled."""
        return self._event.is_set()

    def cancel(self, reason: str | None = None) -> None:
        """Cancel the turn's tool calls. The first reason stays; later calls change nothing."""
        if self.cancelled:
            return
        self.reason = reason
        self.cancelled_at = trio.current_time()
        self._event.set()
        for scope in self._scopes:
            scope.cancel(reason or "the turn was cancelled")

    async def wait(self) -> None:
        """Wait until the turn is cancelled."""
        await self._event.wait()

    @contextmanager
    def link(self, scope: trio.CancelScope) -> Generator[None]:
        """Let the turn's cancellation cancel ``scope`` for the length of a block; at once, if the turn is cancelled already."""
        self._scopes.append(scope)
        if self.cancelled:
            scope.cancel(self.reason or "the turn was cancelled")
        try:
            yield
        finally:
            self._scopes.remove(scope)
