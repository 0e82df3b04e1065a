"""Fixtures of the ledger's tests."""

import sys

import apsw
import pytest


@pytest.fixture
def swallowed_by_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore errors that SQLite itself ignores, as of cleaning up its log: they have no caller, so Python reports them."""
    before = sys.unraisablehook

    def hook(unraisable) -> None:
        if not isinstance(unraisable.exc_value, apsw.Error):
            before(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", hook)
