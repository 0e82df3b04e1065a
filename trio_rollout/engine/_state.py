"""The engine's own failure: stored by whoever meets it, raised to whoever waits.

Engine tasks never raise into the nursery around the user's body. The first failure wins; it is told once by the call that
meets it, or on leaving if nobody was told.

The engine's pen: tells the ledger what happens, and the engine when the ledger breaks.
"""

from typing import NoReturn, final

import attrs

from .._core.events import Event
from .._util.condition import Condition
from ..abc import Ledger
from ..errors import DataRefused, LedgerError


@final
@attrs.define(eq=False, repr=False)
class EngineFailure:
    """Whether the engine has failed, and whether its user knows. ``obstacle``: what only its user can remove.

    ``closing``: its block is being left.
    """

    changed: Condition
    error: Exception | None = attrs.field(default=None, init=False)
    told: bool = attrs.field(default=False, init=False)
    obstacle: str | None = attrs.field(default=None, init=False)
    closing: bool = attrs.field(default=False, init=False)

    def fail(self, error: Exception) -> None:
        """Store a failure and wake everybody who waits for something that cannot come now."""
        if self.error is None:
            self.error = error
        self.changed.notify()

    def obstruct(self, obstacle: str | None) -> None:
        """Nothing goes on until the user has done something, or again (None); wake everybody who waits."""
        self.obstacle = obstacle
        self.changed.notify()

    def close(self) -> None:
        """The engine's block is being left; wake everybody who waits for what it will not do any more."""
        self.closing = True
        self.changed.notify()

    def check(self) -> None:
        """Raise the failure, if there is one that nobody was told of."""
        if self.error is not None and not self.told:
            self.tell(self.error)

    def tell(self, error: Exception) -> NoReturn:
        """Raise the failure to somebody who can do something about it."""
        self.told = True
        raise error


@final
@attrs.frozen(eq=False)
class LedgerWriter:
    """Writes events to the ledger, or nowhere if there is none."""

    ledger: Ledger | None
    fate: EngineFailure

    async def write(self, *events: Event) -> None:
        """Write these events in one transaction; without a ledger this returns at once.

        Blocks until they are on disk. Cancelled before the write was accepted, nothing is written; later it waits.

        Raises:
          DataRefused: an event holds data that can't be stored; the ledger goes on.
          LedgerError: the write failed; the engine fails with it.
        """
        if self.ledger is None:
            return
        try:
            await self.ledger.record(events)
        except DataRefused:
            raise
        except LedgerError as error:
            self.fate.fail(error)
            raise
