"""A batch: groups on their way to the trainer."""

from collections.abc import Awaitable, Callable
from typing import final

import attrs

from ._core.statistics import EngineStatistics
from ._core.values import Group


@final
@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Finished groups, handed out together as one step.

    ``step`` grows by one a batch, across restarts. ``redelivered``: some of them were handed out before, to a trainer that
    went back to an older checkpoint or died. ``statistics`` is the engine's at the moment of delivery.
    """

    id: str
    step: int
    groups: tuple[Group, ...]
    statistics: EngineStatistics
    redelivered: bool
    _ack: Callable[["Batch"], Awaitable[None]] = attrs.field(repr=False, alias="ack")

    async def ack(self) -> None:
        """Say that no restore will ever go back before this batch: call it when your checkpoint is safe.

        Blocks until the ledger has it. Cancelled before that, the batch is not acked and may be acked again.

        Raises:
          RolloutError: it was acked before, or it is not a batch that this engine has out.
        """
        await self._ack(self)
