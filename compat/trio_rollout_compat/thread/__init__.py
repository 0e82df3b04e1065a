"""The engine inside a program that is not Trio: its thread, and calls into it.

Two threads take part, and the first line of each class and function says on which it runs:

- **The engine's thread** runs ``trio.run`` with the lifespan that the host gave: servers, ledger, engine.
- **The host's threads** start it, call functions on it and close it: threads that may block, or an asyncio loop's.

Read in this order: ``_engine_thread`` (what hosts call, and the end of the process), ``_run`` (one call, and what runs on the
engine's thread).
"""

from ._engine_thread import (
    EngineForked,
    EngineStuck,
    EngineThread,
    aopen_engine_thread,
    exit_on_sigterm,
    open_engine_thread,
)

__all__ = [
    "EngineForked",
    "EngineStuck",
    "EngineThread",
    "aopen_engine_thread",
    "exit_on_sigterm",
    "open_engine_thread",
]
