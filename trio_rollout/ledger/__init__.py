"""The engine's memory on disk: the state of every group in SQLite, large bodies in segment files.

``open_ledger`` writes a ledger, ``read_ledger`` reads one, also while a run writes it.
"""

from .._core.lifecycle import State
from ._group_commit import BatchLimits
from ._open import DiskLedger, open_ledger
from ._reader import GroupSummary, LedgerReader, read_ledger
from ._rescoring import STATES as RESCORED_STATES
from ._samples import GroupSamples

__all__ = [
    "RESCORED_STATES",
    "BatchLimits",
    "DiskLedger",
    "GroupSamples",
    "GroupSummary",
    "LedgerReader",
    "State",
    "open_ledger",
    "read_ledger",
]
