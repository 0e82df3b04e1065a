"""The in-loop backend: trio-asyncio, in the engine's own thread. Exact under a virtual clock; one thread to debug.

**Importing trio_asyncio changes stock asyncio in the whole process**, for good, also in threads that have nothing to do with
it. Therefore it is imported here, when this backend is opened, and nowhere else. ``mend`` gives other threads their stock
loops back. One change stays: ``asyncio.get_running_loop`` and ``current_task`` are Python functions (2 to 4 microseconds a call in
place of 0.05). Not for processes in which a fast asyncio program runs beside the engine: choose attach or thread there.
"""

import _asyncio
import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from trio_rollout.lowlevel import open_service

from ._backends import RunningLoop, posts_to, replies_to
from ._errors import BridgeError

_log: Final = logging.getLogger("trio_rollout.compat")


@attrs.frozen
class InLoopBackend:
    """On Trio's thread, which is the loop's as well: runs a trio-asyncio loop inside this Trio run."""

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[RunningLoop]:
        """Open the loop. Leaving closes it; that does not block, because the bridge has ended its calls before.

        Raises:
          BridgeError: this Trio run is itself a guest on an asyncio loop.
        """
        refuse_guest_mode()
        package = _trio_asyncio()
        token = trio.lowlevel.current_trio_token()

        async def serve(*, task_status: trio.TaskStatus[asyncio.AbstractEventLoop]) -> None:
            async with package.open_loop() as loop:
                survive_exits(loop, package._base.TrioAsyncioExit)
                loop.stop = _not_stopped
                task_status.started(loop)
                try:
                    await trio.sleep_forever()
                finally:
                    del loop.stop

        async with open_service(serve) as loop:

            def prepare(context: contextvars.Context) -> None:
                context.run(package.current_loop.set, loop)

            yield RunningLoop(
                loop=loop,
                post=posts_to(loop),
                reply=replies_to(token),
                prepare=prepare,
                foreign=False,
                describe=f"{loop!r}",
            )


def _trio_asyncio() -> Any:
    """Import the package and mend it."""
    import trio_asyncio  # ruff: ignore[import-outside-top-level]  importing it changes asyncio
    from trio_asyncio import _base, _loop  # ruff: ignore[import-outside-top-level]

    mend(_loop, _base)
    return trio_asyncio


def mend(loop: Any, base: Any) -> None:
    """Give other threads their stock loops back, and keep Ctrl-C out of the loop's inside.

    Private names: pinned to ``>= 0.16, < 0.17`` in the project, checked here, and tested.
    Unmended, every new loop of the process is trio-asyncio's (six times slower, without executors), and a
    KeyboardInterrupt inside the loop's own task leaves ``open_loop`` waiting for ever.

    Raises:
      BridgeError: these names are missing.
    """
    try:
        policy, original, main_loop = loop._FakedPolicy, loop._original_policy, base.BaseTrioEventLoop._main_loop
    except AttributeError as error:
        raise BridgeError(f"this version of trio_asyncio cannot be mended: {error}; 0.16 is the one known") from error
    policy.policy = original
    trio.lowlevel.enable_ki_protection(main_loop)


def survive_exits(loop: Any, regular: type[BaseException]) -> None:
    """Let the loop go on when a bare callback raises SystemExit or KeyboardInterrupt (Ctrl-C itself never comes there).

    ``regular`` is the exception with which the loop ends itself. Unmended, the loop ends without a word, and everything that
    waits for it waits for ever.
    """
    one_step = loop._main_loop_one

    async def step(**options: Any) -> None:
        try:
            await one_step(**options)
        except regular:  # a SystemExit as well
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            _log.error("a callback on the bridge's loop raised %r; the loop goes on", error, exc_info=error)

    loop._main_loop_one = step


def _not_stopped() -> None:
    """Replace ``loop.stop()``: user code must not stop a loop that the bridge owns, calls would wait for ever."""
    _log.error("user code stops the bridge's loop; the loop goes on")


def refuse_guest_mode() -> None:
    """Raise BridgeError if an asyncio loop runs on this thread already.

    asyncio's C accelerator then hands out the host's loop in place of trio-asyncio's: gather, futures, streams and
    subprocesses end up on the wrong one.
    """
    host = _asyncio._get_running_loop()  # asyncio's own is trio_asyncio's once that was imported
    if host is not None:
        raise BridgeError(
            f"the in-loop backend inside of {host!r}: Trio runs as a guest of that loop, and asyncio's C code would hand "
            "that loop out in place of trio-asyncio's; use the attach backend with it, or an EngineThread"
        )
