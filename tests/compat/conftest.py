"""Fixtures: bridges with each backend, a host's loop to attach to, and a fake server for slime's and miles's tests."""

import asyncio
import importlib
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from trio_rollout.testing import open_fake_sglang, sim_run
from trio_rollout_compat.bridge import Bridge, BridgeSettings, open_bridge
from trio_rollout_compat.thread import open_engine_thread

OpenBridge = Callable[..., AbstractAsyncContextManager[Bridge]]


@pytest.fixture
def host_loop() -> Generator[asyncio.AbstractEventLoop]:
    """A loop that a host runs on a separate thread, as slime does."""
    loop = asyncio.SelectorEventLoop()
    thread = threading.Thread(target=loop.run_forever, name="host")
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture(params=["attach", "thread", "in-loop"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    return request.param


@pytest.fixture
def open_any(backend: str, request: pytest.FixtureRequest) -> OpenBridge:
    """``async with open_any(on_leak=...) as bridge``: short times, because real ones pass here."""
    loop = request.getfixturevalue("host_loop") if backend == "attach" else None

    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncGenerator[Bridge]:
        async with open_bridge(
            backend, loop=loop, settings=BridgeSettings(**{"again": 0.02, "grace": 20.0, "slow_step": 60.0, **settings})
        ) as bridge:
            yield bridge

    return opened


@pytest.fixture
async def bridge(open_any: OpenBridge) -> AsyncGenerator[Bridge]:
    """A bridge with the defaults of ``open_any``."""
    async with open_any() as bridge:
        yield bridge


@pytest.fixture
def server() -> Generator[Any]:
    """A fake SGLang on its own thread: ``server.call(fn)`` runs there, ``server.value`` is the fake."""
    with open_engine_thread(open_fake_sglang) as thread:
        yield thread


@pytest.fixture
def seen(host: Any) -> list[Any]:
    """The arguments that the host's user functions were called with."""
    return importlib.import_module("user_functions").SEEN


def _simulated(afn: Any, *, seed: str, clock: Any = None, instruments: Any = ()) -> Any:
    assert clock is None, "these tests bring a clock of their own"
    return sim_run(afn, seed=seed, instruments=instruments).value


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Run each test of leases under a schedule drawn from its name; those with a ledger wait for a real disk."""
    for item in items:
        if (
            item.path.name == "test_lease_grain.py"
            and inspect.iscoroutinefunction(item.obj)
            and "tmp_path" not in item.fixturenames
        ):
            item.add_marker(pytest.mark.trio(run=partial(_simulated, seed=item.nodeid)), append=False)
