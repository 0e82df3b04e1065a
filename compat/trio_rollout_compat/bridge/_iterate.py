"""An asyncio generator as a Trio iterator: one asyncio task drives the generator from its first step to its last.

One task, because a generator may hold an ``asyncio.timeout`` or a task group across its yields, and those belong to the task
that entered them. ``Feed`` asks for an item on Trio's thread, ``_pump`` gets it on the loop's.
"""

import asyncio
import functools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, final

import attrs
import trio

from trio_rollout.lowlevel import open_service

from ._backends import RunningLoop
from ._call import name_of

_END: Final = object()


@attrs.frozen
class _Raised:
    """On any thread: the exception that the generator raised in place of the next item."""

    error: Exception


@final
@attrs.define(eq=False)
class Feed:
    """On Trio's thread: asks for one item at a time."""

    _ask: Callable[[], None]
    _items: trio.MemoryReceiveChannel[Any]
    _asked: bool = attrs.field(default=False, init=False)
    _over: bool = attrs.field(default=False, init=False)

    def __aiter__(self) -> "Feed":
        return self

    async def __anext__(self) -> Any:
        """Wait for the next item. Cancelled, the item is not lost: the next call gets it."""
        if self._over:
            raise StopAsyncIteration
        if not self._asked:
            self._asked = True
            self._ask()
        item = await self._items.receive()
        self._asked = False
        self._over = item is _END or isinstance(item, _Raised)
        if isinstance(item, _Raised):
            raise item.error
        if item is _END:
            raise StopAsyncIteration
        return item


def _pump(
    make: Callable[[], AsyncIterator[Any]], wanted: asyncio.Event, deliver: Callable[[object], None]
) -> Callable[[], Any]:
    """Return the function for the loop's thread: one item for each time that ``wanted`` is set; closes the generator."""

    async def pump() -> None:
        items = make()
        try:
            while True:
                await wanted.wait()
                wanted.clear()
                try:
                    # With a default, anext crashes the interpreter if __anext__ raises StopIteration.
                    item: object = await anext(items)
                except StopAsyncIteration:
                    item = _END
                except Exception as error:  # ruff: ignore[blind-except]  it is raised where the item was asked for
                    item = _Raised(error)
                deliver(item)
                if item is _END or isinstance(item, _Raised):
                    return
        finally:
            if (aclose := getattr(items, "aclose", None)) is not None:
                await aclose()  # noqa: ASYNC102  asyncio code: the bridge bounds it

    pump.__qualname__ = name_of(make).rpartition(".")[2]  # its misuse is the generator's
    pump.__module__ = name_of(make).rpartition(".")[0]
    return pump


@asynccontextmanager
async def iterate(
    call: Callable[..., Awaitable[object]], running: RunningLoop, make: Callable[[], AsyncIterator[Any]]
) -> AsyncGenerator[Feed]:
    """On Trio's thread: see ``Bridge.iterate``. ``call`` is the bridge's."""
    wanted = asyncio.Event()
    send, receive = trio.open_memory_channel[Any](math.inf)  # bounded by the asking: one at a time
    pump = _pump(make, wanted, lambda item: running.reply(functools.partial(send.send_nowait, item)))

    async def serve(*, task_status: trio.TaskStatus[Feed]) -> None:
        task_status.started(Feed(lambda: running.post(wanted.set), receive))
        await call(pump)

    with send, receive:
        async with open_service(serve) as feed:  # leaving cancels the call, and that closes the generator
            yield feed
