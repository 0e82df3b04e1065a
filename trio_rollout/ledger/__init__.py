"""What is on disk: the truth about every group, in SQLite, and the bodies, in segment files."""

from ._group_commit import BatchLimits as BatchLimits
from ._open import DiskLedger as DiskLedger
from ._open import open_ledger as open_ledger
from ._reader import GroupSummary as GroupSummary
from ._reader import LedgerReader as LedgerReader
from ._reader import read_ledger as read_ledger

__all__ = [
    "BatchLimits",
    "DiskLedger",
    "GroupSummary",
    "LedgerReader",
    "open_ledger",
    "read_ledger",
]
