"""Telling instruments what happens. An instrument that raises is reported once and left out from then on."""

import logging
from collections.abc import Iterable
from typing import final

import attrs

from ..abc import Instrument

_LOGGER = logging.getLogger("trio_rollout")


def _listed(instruments: Iterable[Instrument]) -> list[Instrument]:
    return list(instruments)


@final
@attrs.define(eq=False, repr=False)
class Instruments:
    """The instruments that still work."""

    _working: list[Instrument] = attrs.field(converter=_listed)

    def emit(self, name: str, **fields: object) -> None:
        """Tell every instrument."""
        for instrument in list(self._working):
            try:
                instrument.event(name, fields)
            except Exception:
                self._working.remove(instrument)
                _LOGGER.exception("instrument %r failed at %s and gets no more events", instrument, name)
