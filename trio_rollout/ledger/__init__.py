"""The engine's memory on disk: the state of every group in SQLite, large bodies in segment files.

``open_ledger`` writes a ledger, ``read_ledger`` reads one, also while a run writes it.
"""

from ._group_commit import BatchLimits as BatchLimits
from ._open import DiskLedger as DiskLedger
from ._open import open_ledger as open_ledger
from ._reader import GroupSummary as GroupSummary
from ._reader import LedgerReader as LedgerReader
from ._reader import read_ledger as read_ledger
from ._samples import GroupSamples as GroupSamples

__all__ = [
    "BatchLimits",
    "DiskLedger",
    "GroupSamples",
    "GroupSummary",
    "LedgerReader",
    "open_ledger",
    "read_ledger",
]
