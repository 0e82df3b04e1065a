"""Asyncio inside Trio: one bridge, three backends.

Read in this order: ``_open`` (choosing a backend), ``_bridge`` (what users call), ``_call`` (one call as the loop sees it),
``_ending`` (how calls end that do not end by themselves), ``_cleanup``, ``_guard`` and ``_tasks`` (what is hooked into the loop),
``_attach``, ``_thread`` and ``_inloop`` (the backends), ``_iterate``, ``_portal`` (the way back from asyncio into Trio).
"""

from ._account import BridgeSettings as BridgeSettings
from ._account import BridgeStatistics as BridgeStatistics
from ._account import Offence as Offence
from ._account import OnLeak as OnLeak
from ._bridge import BackendName as BackendName
from ._bridge import Bridge as Bridge
from ._bridge import open_bridge as open_bridge
from ._errors import AsyncioCancelled as AsyncioCancelled
from ._errors import AsyncioExit as AsyncioExit
from ._errors import BridgeClosed as BridgeClosed
from ._errors import BridgeError as BridgeError
from ._errors import LeakedTasks as LeakedTasks
from ._portal import Portal as Portal

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
    "Offence",
    "OnLeak",
    "Portal",
    "open_bridge",
]
