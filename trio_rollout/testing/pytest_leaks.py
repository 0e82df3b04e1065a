"""A pytest plugin that fails every test that leaves something behind; see ``no_leaks`` for what is seen.

Enable it with ``pytest_plugins = ["trio_rollout.testing.pytest_leaks"]`` in the top ``conftest.py``, or with
``pytest -p trio_rollout.testing.pytest_leaks``. A test that fails by itself is not checked.
"""

import gc
import sys
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import pytest

from ._leaks import LeakError, LeakInstrument, no_leaks

T = TypeVar("T")

_INSTRUMENT = pytest.StashKey[LeakInstrument]()
_FAILED = pytest.StashKey[bool]()
_FROZEN_AT = pytest.StashKey[int]()


def _instrumented(run: Callable[..., T], instrument: LeakInstrument) -> Callable[..., T]:
    def run_watched(*args: Any, instruments: Any = (), **kwargs: Any) -> T:
        return run(*args, instruments=[*instruments, instrument], **kwargs)

    return run_watched


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the instrument into each run that pytest-trio makes, through the marker that it takes the run from."""
    for item in items:
        marker = item.get_closest_marker("trio")
        if marker is not None and "run" in marker.kwargs:
            item.stash[_INSTRUMENT] = LeakInstrument()
            run = _instrumented(marker.kwargs["run"], item.stash[_INSTRUMENT])
            item.add_marker(pytest.mark.trio(run=run), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Remember a failure of the test itself."""
    if call.when == "call":
        item.stash[_FAILED] = call.excinfo is not None
    return (yield)


def _collect_quickly(session: pytest.Session) -> None:
    """Freeze everything that is alive out of the garbage collector, after a collection if modules were imported.

    A full collection over a few big libraries takes 50 ms, over everything that a long session keeps half a second, over the
    objects of one test microseconds. The test before this one ended with a collection, so hardly any garbage is frozen.
    """
    if session.stash.get(_FROZEN_AT, 0) != len(sys.modules):
        gc.collect()
        session.stash[_FROZEN_AT] = len(sys.modules)
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Unfreeze everything."""
    gc.unfreeze()


@pytest.fixture(autouse=True)  # ruff: ignore[pytest-fixture-autouse]  this is what the plugin is for
def _no_leaks(request: pytest.FixtureRequest) -> Generator[None]:
    _collect_quickly(request.session)
    try:
        with no_leaks(request.node.stash.get(_INSTRUMENT, None)):
            yield
    except LeakError as error:
        if not request.node.stash.get(_FAILED, False):
            pytest.fail(str(error), pytrace=False)
