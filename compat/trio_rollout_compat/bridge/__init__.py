"""Asyncio inside Trio: one bridge to an asyncio loop, which runs in one of three ways.

Two threads take part, and the first line of each class and function says on which it runs:

- **Trio's thread** runs the Trio run that opened the bridge: the engine, and everything that calls the bridge.
- **The loop's thread** runs the asyncio loop and user code. The attach and thread backends have a second thread for it; with
  the in-loop backend both are the same thread.

They talk through two functions of ``RunningLoop``: ``post`` runs a function on the loop's thread, ``reply`` one on Trio's.
No lock is needed except where a method is for any thread: everything else is owned by one side.

Read in this order: ``_bridge`` (what users call, and how a backend is chosen), ``_call`` (one call on the loop's thread),
``_cancel`` (cancellation through the bridge, the essay), ``_registry`` (the calls that are alive), ``_hooks`` (what is hooked
into the loop), ``_backends`` and ``_inloop`` (the three kinds of loops), ``_iterate`` (generators), ``_portal`` (the way
back from asyncio into Trio), ``_errors``, ``_settings``.
"""

from ._bridge import BackendName as BackendName
from ._bridge import Bridge as Bridge
from ._bridge import open_bridge as open_bridge
from ._errors import AsyncioCancelled as AsyncioCancelled
from ._errors import AsyncioExit as AsyncioExit
from ._errors import BridgeClosed as BridgeClosed
from ._errors import BridgeError as BridgeError
from ._errors import LeakedTasks as LeakedTasks
from ._portal import Portal as Portal
from ._settings import BridgeSettings as BridgeSettings
from ._settings import BridgeStatistics as BridgeStatistics
from ._settings import Misuse as Misuse
from ._settings import OnLeak as OnLeak

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
