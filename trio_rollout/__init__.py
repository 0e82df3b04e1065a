"""A Trio-native rollout engine for reinforcement learning of language models.

The package by rooms, in the order in which a prompt travels:

- ``sources/``    prompts: JSONL files, iterables, generated tasks
- ``engine/``     slots, attempts, deadlines, retries, delivery to the trainer, weight updates, evaluation
- ``sglang/``     the inference servers: choice of a server, requests, aborts, pause and resume
- ``tokenizer/``  text and messages to token ids
- ``gateway/``    agents that speak OpenAI's or Anthropic's API over HTTP
- ``tools/``      commands, sandboxes and tool calls of a rollout
- ``rewards/``    stock scorers, and scorers in threads and processes
- ``ledger/``     the engine's memory on disk
- ``observe/``    statistics, instruments, the task tree, the watchdog
- ``cli/``        the command ``trio-rollout``

``abc`` has the protocols that users implement, ``errors`` the exceptions, ``lowlevel`` the parts for adapters. ``testing`` has
fakes and sweeps for tests, ``tiny`` a small language model behind SGLang's protocol. ``_core``, ``_util`` and ``_http`` are
the ground floor. ``ARCHITECTURE.md`` is the map.
"""

from ._core.enums import Cause, Leftovers, PauseMode, Status, Stop
from ._core.sampling import SamplingParams
from ._core.settings import Deadlines, Discard, EngineSettings, Pace, Retry, Staleness
from ._core.statistics import EngineStatistics, ServerCounts, ServerStatistics
from ._core.values import Failure, Group, GroupId, Prompt, QuarantineReport, Segment, Trajectory, Turn, VersionSpan
from ._util.ports import Ports
from .abc import Drop, Keep
from .engine._delivery import Batch
from .engine._engine import Batches, RolloutEngine, open_rollout_engine
from .engine._rollout import SingleTurn
from .engine._weights import WeightUpdate
from .ledger import open_ledger
from .rewards import exact_match, in_process, in_thread, open_scorer_processes, regex_reward
from .sglang import ServerSettings, SGLangServers, open_sglang_servers
from .sources import IterableSource, JsonlSource, TaskSource

__all__ = [  # in the order a prompt travels
    # sources
    "Prompt",
    "JsonlSource",
    "IterableSource",
    "TaskSource",
    # rollouts
    "SingleTurn",
    "SamplingParams",
    "Turn",
    "VersionSpan",
    "Stop",
    "Leftovers",
    # servers
    "open_sglang_servers",
    "SGLangServers",
    "ServerSettings",
    "ServerStatistics",
    "ServerCounts",
    # rewards and filters
    "exact_match",
    "regex_reward",
    "in_thread",
    "in_process",
    "open_scorer_processes",
    "Keep",
    "Drop",
    # what comes out
    "Segment",
    "Trajectory",
    "Status",
    "Group",
    "GroupId",
    "Batch",
    "Batches",
    "Failure",
    "Cause",
    "QuarantineReport",
    # the ledger
    "open_ledger",
    # the engine
    "open_rollout_engine",
    "RolloutEngine",
    "EngineSettings",
    "Deadlines",
    "Retry",
    "Staleness",
    "Pace",
    "Discard",
    "Ports",
    "EngineStatistics",
    # weights
    "PauseMode",
    "WeightUpdate",
]
