"""Aborted answers of custom functions: a host's doing while something else ends between them, the function's own fault if not."""

import logging
from typing import Final, final

import attrs

from trio_rollout._backoff import wait_s
from trio_rollout.errors import GenerateError, ServerLost

_log: Final = logging.getLogger("trio_rollout.compat")
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
ROUNDS: Final = 20
"""So often everything in flight may come back aborted, with nothing else in between: seven and a half minutes."""


@final
@attrs.define(eq=False)
class Aborts:
    """Counts them, for all custom functions of an engine that has ``at_once`` rollouts in flight.

    An update of the weights aborts at most that many at once. When as many more come, with no answer of another kind, each of
    them keeps its slot for a while, longer with each round, so that the source is not read empty meanwhile.
    """

    at_once: int
    in_a_row: int = 0

    def forget(self) -> None:
        """An answer of another kind came."""
        self.in_a_row = 0

    async def note(self, lost: ServerLost) -> None:
        """One came back aborted. Returns when it may be tried again.

        Raises:
          GenerateError: everything is aborted for so long that it can't be the host's updates.

        """
        rounds = self.in_a_row // self.at_once
        self.in_a_row += 1
        if rounds >= ROUNDS:
            raise GenerateError(
                f"{self.in_a_row} answers in a row came back aborted, with {self.at_once} in flight, and nothing else in between: "
                "this is no update of the weights; the generate function, or its servers, abort everything"
            ) from lost
        if not rounds:
            return  # noqa: ASYNC910  the engine itself waits before it tries again
        if self.in_a_row % self.at_once == 1 or self.at_once == 1:
            _log.warning("%d answers in a row came back aborted, and nothing else in between: %s", self.in_a_row, lost)
        await wait_s(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (rounds - 1)))
