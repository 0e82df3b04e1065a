"""Cancelling a turn: stops its tool calls, each of which then returns a value. Not a cancelled scope of the caller.

A scope that is cancelled can't return anything to its own caller, so this one is linked into each call instead.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import attrs
import trio


@final
@attrs.define(eq=False)
class TurnCancellation:
    """The stop of one turn. Whether a process dies with it is another question: see ``OnTurnCancel``."""

    reason: str | None = attrs.field(default=None, init=False)
    cancelled_at: float | None = attrs.field(default=None, init=False)
    _event: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _scopes: list[trio.CancelScope] = attrs.field(factory=list, init=False, repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether the turn is cancelled."""
        return self._event.is_set()

    def cancel(self, reason: str | None = None) -> None:
        """Cancel the turn's calls. The first reason stays; later calls change nothing."""
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
        """For the length of a block the turn's cancellation cancels ``scope``, at once if it came before."""
        self._scopes.append(scope)
        if self.cancelled:
            scope.cancel(self.reason or "the turn was cancelled")
        try:
            yield
        finally:
            self._scopes.remove(scope)

    @contextmanager
    def scope(self) -> Generator[trio.CancelScope]:
        """A cancel scope that is linked to the turn."""
        with trio.CancelScope() as scope, self.link(scope):
            yield scope
