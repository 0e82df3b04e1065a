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

from ._servers import Answer, AsyncioClient, aiohttp_client, httpx_client, open_asyncio_servers
from ._user_code import AsyncioRollout, asyncio_generate, asyncio_reward
from .bridge import Bridge, BridgeSettings, OnLeak, open_bridge
from .sandboxes import SlimeSandbox, SlimeSandboxes, open_slime_sandboxes
from .thread import EngineThread, aopen_engine_thread, exit_on_sigterm, open_engine_thread

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
