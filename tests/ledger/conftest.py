"""What several tests of the ledger need."""

import sys

import apsw
import pytest


@pytest.fixture
def swallowed_by_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that SQLite itself passes over, as those of tidying its log, have no caller; Python calls them unraisable."""
    before = sys.unraisablehook

    def hook(unraisable) -> None:
        if not isinstance(unraisable.exc_value, apsw.Error):
            before(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", hook)
