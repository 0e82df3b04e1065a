"""The Trio engine inside a program that is not Trio: a thread of its own, and a portal into it.

Read ``_open`` and ``_engine_thread`` first, then ``_job`` (one call), ``_life`` (what runs on the thread), ``_exit``, ``_sigterm``.
"""

from ._engine_thread import EngineForked as EngineForked
from ._engine_thread import EngineStuck as EngineStuck
from ._engine_thread import EngineThread as EngineThread
from ._engine_thread import exit_on_sigterm as exit_on_sigterm
from ._open import aopen_engine_thread as aopen_engine_thread
from ._open import open_engine_thread as open_engine_thread

__all__ = [
    "EngineForked",
    "EngineStuck",
    "EngineThread",
    "aopen_engine_thread",
    "exit_on_sigterm",
    "open_engine_thread",
]
