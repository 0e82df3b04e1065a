"""Telling instruments what happens. An instrument that raises is reported once and left out from then on."""

import logging
from collections.abc import Iterable
from typing import final

import attrs

from .._core.events import Event
from .._util.user_code import ends_the_process
from ..abc import Instrument

_LOGGER = logging.getLogger("trio_rollout")


def _listed(instruments: Iterable[Instrument]) -> list[Instrument]:
    return list(instruments)


@final
@attrs.define(eq=False, repr=False)
class Instruments:
    """The instruments that still work.

    Where an event is made for each turn or sample, the caller first asks if there are any: without them it costs nothing.
    """

    working: list[Instrument] = attrs.field(converter=_listed, factory=list)

    def emit(self, event: Event) -> None:
        """Tell every instrument."""
        for instrument in list(self.working):
            try:
                instrument.event(event)
            except BaseException as error:  # noqa: ASYNC103  an instrument is user code
                if ends_the_process(error):
                    raise
                self.working.remove(instrument)
                name = type(event).__name__
                _LOGGER.exception("instrument %r failed at %s and gets no more events", instrument, name)
