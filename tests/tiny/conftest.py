"""A tiny server without sockets, and its client: virtual time, one second for every decode step."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_rollout.tiny import TinySettings, open_tiny

from ._client import Client

OpenClient = Callable[..., AbstractAsyncContextManager[Client]]


def _in_virtual_time(run: Callable[..., Any], *args: Any, clock: object = None, **kwargs: Any) -> Any:
    del clock
    return trio.run(run, *args, clock=MockClock(autojump_threshold=0), **kwargs)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run every test that uses ``open_client`` in virtual time."""
    for item in items:
        if "open_client" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.trio(run=_in_virtual_time), append=False)


@pytest.fixture
def open_client(nursery: trio.Nursery) -> OpenClient:
    """``async with open_client(**settings) as client`` opens a new server; a step takes a second of virtual time."""

    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncGenerator[Client]:
        async with open_tiny(TinySettings(**({"step_delay": 1.0} | settings))) as server:
            yield Client(server, nursery)

    return opened


@pytest.fixture
async def client(open_client: OpenClient) -> AsyncGenerator[Client]:
    """A server that runs two requests at once and queues two."""
    async with open_client(max_running=2, max_queued=2) as client:
        yield client
