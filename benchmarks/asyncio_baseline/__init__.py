"""The engine's job as a good asyncio programmer would write it today: what the benchmarks compare with.

The same job: groups of n rollouts, slots counted in rollouts, deadlines, retries, requeues at the end of the queue, an abort
for every cancelled request, rewards, batches, weight-update windows. Written with what asyncio offers: ``create_task`` and
done-callbacks, ``TaskGroup``, ``asyncio.timeout``, ``wait_for``, ``shield``, ``gather``. It is no straw man: connections are
kept alive, no pool is smaller than the concurrency, aborts never queue behind generation, and it passes the same fault-free
tests as the engine (``tests/benchmarks``).
"""

from .clients import AiohttpClient, HttpxClient
from .codecs import JsonCodec, OurCodec
from .engine import Engine, EngineSettings, GroupResult, Rollout
from .values import Aborted, EndOfData, Prompt, Sample

__all__ = [
    "Aborted",
    "AiohttpClient",
    "EndOfData",
    "Engine",
    "EngineSettings",
    "GroupResult",
    "HttpxClient",
    "JsonCodec",
    "OurCodec",
    "Prompt",
    "Rollout",
    "Sample",
]
