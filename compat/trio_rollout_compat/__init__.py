"""Hosts and clients that are not Trio: asyncio code inside the engine, and the engine inside asyncio, threads and trainers.

General layout:

- ``bridge`` runs asyncio functions from Trio; ``_user_code``, ``_servers`` and ``sandboxes`` make generate functions, scorers, an
  HTTP client and sandboxes of them
- ``thread`` runs the engine beside a program that is not Trio
- ``slime``, ``miles`` and ``ray`` are the hosts; ``_leasing`` is what a cluster needs without Ray, ``_host_servers`` are servers
  whose weights belong to the host

Only public names of ``trio_rollout`` are used. ``docs/embedding.md`` says which way to choose. Importing this package never
imports trio_asyncio.
"""

from ._servers import Answer as Answer
from ._servers import AsyncioClient as AsyncioClient
from ._servers import aiohttp_client as aiohttp_client
from ._servers import httpx_client as httpx_client
from ._servers import open_asyncio_servers as open_asyncio_servers
from ._user_code import AsyncioRollout as AsyncioRollout
from ._user_code import asyncio_generate as asyncio_generate
from ._user_code import asyncio_reward as asyncio_reward
from .bridge import Bridge as Bridge
from .bridge import BridgeSettings as BridgeSettings
from .bridge import OnLeak as OnLeak
from .bridge import open_bridge as open_bridge
from .sandboxes import SlimeSandbox as SlimeSandbox
from .sandboxes import SlimeSandboxes as SlimeSandboxes
from .sandboxes import open_slime_sandboxes as open_slime_sandboxes
from .thread import EngineThread as EngineThread
from .thread import aopen_engine_thread as aopen_engine_thread
from .thread import exit_on_sigterm as exit_on_sigterm
from .thread import open_engine_thread as open_engine_thread

__all__ = [
    "Answer",
    "AsyncioClient",
    "AsyncioRollout",
    "Bridge",
    "BridgeSettings",
    "EngineThread",
    "OnLeak",
    "SlimeSandbox",
    "SlimeSandboxes",
    "aiohttp_client",
    "aopen_engine_thread",
    "asyncio_generate",
    "asyncio_reward",
    "exit_on_sigterm",
    "httpx_client",
    "open_asyncio_servers",
    "open_bridge",
    "open_engine_thread",
    "open_slime_sandboxes",
]
