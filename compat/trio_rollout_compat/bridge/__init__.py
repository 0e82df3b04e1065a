"""Asyncio inside Trio: one bridge to an asyncio loop, which runs in one of three ways.

Two threads take part, and the first line of each class and function says on which it runs:

- **Trio's thread** runs the Trio run that opened the bridge: the engine, and everything that calls the bridge.
- **The loop's thread** runs the asyncio loop and user code. The attach and thread backends have a second thread for it; with
  the in-loop backend both are the same thread.

They talk through two functions of ``RunningLoop``: ``post`` runs a function on the loop's thread, ``reply`` one on Trio's.
No lock is needed except where a method is for any thread: everything else is owned by one side.

Read in this order: ``_bridge`` (what users call, and how a backend is chosen), ``_call`` (one call on the loop's thread),
``_cancel`` (the calls that are alive and their cancellation, the essay), ``_hooks`` (what is hooked into the loop),
``_backends`` and ``_inloop`` (the three kinds of loops), ``_portal`` (the way back from asyncio into Trio), ``_errors``,
``_settings``.
"""

from ._bridge import BackendName, Bridge, open_bridge
from ._errors import AsyncioCancelled, AsyncioExit, BridgeClosed, BridgeError, LeakedTasks
from ._portal import Portal
from ._settings import BridgeSettings, BridgeStatistics, Misuse, OnLeak

__all__ = [
    "AsyncioCancelled",
    "AsyncioExit",
    "BackendName",
    "Bridge",
    "BridgeClosed",
    "BridgeError",
    "BridgeSettings",
    "BridgeStatistics",
    "LeakedTasks",
    "Misuse",
    "OnLeak",
    "Portal",
    "open_bridge",
]
