"""An engine thread for the length of a block, in synchronous and in asyncio programs.

Separate because these blocks are for user code; the engine thread itself knows no block.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TypeVar

from ._engine_thread import EngineThread

V = TypeVar("V")


@contextmanager
def open_engine_thread(
    lifespan: Callable[[], AbstractAsyncContextManager[V]], *, grace: float = 60.0, start_timeout: float | None = None
) -> Generator[EngineThread[V]]:
    """An EngineThread for the length of a block.

    Entering blocks until the lifespan has yielded. Leaving closes it and blocks until everything is cleaned up, at most ``grace``
    seconds: it should exceed ``Deadlines.drain``. The body's own exception comes out as itself.

    In an asyncio program it would block the loop: ``aopen_engine_thread`` does not.

    Raises:
      EngineStuck: it was not ready after ``start_timeout``, or not over after ``grace`` seconds.
      BaseException: what the lifespan raised, if no call had told it.

    """
    thread = EngineThread(lifespan, grace=grace)
    try:
        yield thread.start(start_timeout)
    except BaseException:
        with contextlib.suppress(Exception):  # the body's own error says more
            thread.close(grace)
        raise
    thread.close(grace)


@asynccontextmanager
async def aopen_engine_thread(
    lifespan: Callable[[], AbstractAsyncContextManager[V]], *, grace: float = 60.0, start_timeout: float | None = None
) -> AsyncGenerator[EngineThread[V]]:
    """``open_engine_thread`` for asyncio programs: the loop goes on while it starts and while it ends.

    Cancelled, a start is given up. Not to be replaced by ``asyncio.to_thread(opened.__enter__)``: ``asyncio.run`` waits for its
    threads before it lets a SystemExit or a KeyboardInterrupt out, and so for a start that may never end.

    Raises:
      EngineStuck, BaseException: as ``open_engine_thread``.

    """
    thread = EngineThread(lifespan, grace=grace)
    try:
        yield await thread.astart(start_timeout)
    except BaseException:
        with contextlib.suppress(Exception):  # the body's own error says more
            await thread.aclose(grace)  # noqa: ASYNC102  asyncio, and bounded
        raise
    await thread.aclose(grace)
