"""The engine's pen: tells the ledger what happens, and the engine when the ledger breaks."""

from typing import final

import attrs

from ._core.events import Event
from ._fate import Fate
from .abc import Ledger
from .errors import DataRefused, LedgerError


@final
@attrs.frozen(eq=False)
class Record:
    """Writes events to the ledger, or nowhere if there is none."""

    ledger: Ledger | None
    fate: Fate

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
