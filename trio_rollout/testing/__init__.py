"""For the tests of those who build on the engine: what a test left behind."""

from ._leaks import LeakError as LeakError
from ._leaks import LeakInstrument as LeakInstrument
from ._leaks import no_leaks as no_leaks

__all__ = ["LeakError", "LeakInstrument", "no_leaks"]
