"""Opening a bridge: which backend, and the scope it lives in."""

import asyncio
import enum
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from trio_rollout._util.service import open_service
from trio_rollout.errors import SettingsError

from ._account import BridgeSettings
from ._backend import Backend
from ._bridge import Bridge
from ._inloop import InLoop
from ._thread import Attach, Thread

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
_DEFAULTS: Final = BridgeSettings()


class BackendName(enum.Enum):
    """Where asyncio code runs."""

    ATTACH = "attach"
    """On a loop that the host owns and runs on another thread. The right one whenever there is such a loop."""
    THREAD = "thread"
    """On a loop of the bridge's own, on a thread of its own. User code that blocks does not stall the engine."""
    IN_LOOP = "in-loop"
    """On a trio-asyncio loop in the engine's thread: exact under a virtual clock. **Changes stock asyncio in the whole
    process, for good**; see ``docs/embedding.md`` before choosing it."""


def _backend(
    name: BackendName, loop: asyncio.AbstractEventLoop | None, factory: LoopFactory | None, settings: BridgeSettings
) -> Backend:
    if (loop is not None) is not (name is BackendName.ATTACH):
        raise SettingsError(
            f"open_bridge: backend {name.value!r} with loop={loop!r}; a loop belongs to 'attach', which needs one"
        )
    if factory is not None and name is not BackendName.THREAD:
        raise SettingsError(f"open_bridge: backend {name.value!r} makes no loop, so loop_factory has no meaning")
    if loop is not None:
        return Attach(loop, settings.answer)
    return Thread(factory, settings.grace) if name is BackendName.THREAD else InLoop()


@asynccontextmanager
async def open_bridge(
    backend: BackendName | str | None = None,
    *,
    loop: asyncio.AbstractEventLoop | None = None,
    loop_factory: LoopFactory | None = None,
    settings: BridgeSettings = _DEFAULTS,
) -> AsyncGenerator[Bridge]:
    """Run asyncio code until the block is left. Open it outside of the engine that uses it.

    ``backend``: ``"attach"``, ``"thread"`` or ``"in-loop"``; without one it is attach if a ``loop`` is given, else thread.
    ``loop_factory``: for thread, such as ``uvloop.new_event_loop``.

    Entering blocks until the loop answers. Leaving cancels what still runs, and waits for it, for abandoned calls and for a
    loop of its own at most ``grace`` seconds each.

    Raises:
      SettingsError: the arguments do not fit each other.
      BridgeError: the host's loop does not answer, or in-loop was asked for where it cannot work.

    """
    try:
        name = BackendName(backend or (BackendName.THREAD if loop is None else BackendName.ATTACH))
    except ValueError as error:
        allowed = ", ".join(repr(item.value) for item in BackendName)
        raise SettingsError(f"open_bridge: backend {backend!r}, allowed: {allowed}") from error
    opened = _backend(name, loop, loop_factory, settings)

    async def serve(*, task_status: trio.TaskStatus[Bridge]) -> None:
        async with opened() as running:
            bridge = Bridge(running, settings, trio.lowlevel.current_trio_token())
            await bridge._enter()
            task_status.started(bridge)
            await trio.sleep_forever()

    async with open_service(serve, lambda bridge, _error: bridge._leave()) as bridge:
        yield bridge
