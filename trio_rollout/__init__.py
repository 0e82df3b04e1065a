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

from ._core.enums import Cause as Cause
from ._core.enums import Leftovers as Leftovers
from ._core.enums import PauseMode as PauseMode
from ._core.enums import Status as Status
from ._core.enums import Stop as Stop
from ._core.sampling import SamplingParams as SamplingParams
from ._core.settings import Deadlines as Deadlines
from ._core.settings import Discard as Discard
from ._core.settings import EngineSettings as EngineSettings
from ._core.settings import Pace as Pace
from ._core.settings import Retry as Retry
from ._core.settings import Staleness as Staleness
from ._core.statistics import EngineStatistics as EngineStatistics
from ._core.statistics import ServerCounts as ServerCounts
from ._core.statistics import ServerStatistics as ServerStatistics
from ._core.values import Failure as Failure
from ._core.values import Group as Group
from ._core.values import GroupId as GroupId
from ._core.values import Prompt as Prompt
from ._core.values import QuarantineReport as QuarantineReport
from ._core.values import Segment as Segment
from ._core.values import Trajectory as Trajectory
from ._core.values import Turn as Turn
from ._core.values import VersionSpan as VersionSpan
from ._util.ports import Ports as Ports
from .abc import Drop as Drop
from .abc import Keep as Keep
from .engine._delivery import Batch as Batch
from .engine._engine import Batches as Batches
from .engine._engine import RolloutEngine as RolloutEngine
from .engine._engine import open_rollout_engine as open_rollout_engine
from .engine._rollout import SingleTurn as SingleTurn
from .engine._weights import WeightUpdate as WeightUpdate
from .ledger import open_ledger as open_ledger
from .rewards import exact_match as exact_match
from .rewards import in_process as in_process
from .rewards import in_thread as in_thread
from .rewards import open_scorer_processes as open_scorer_processes
from .rewards import regex_reward as regex_reward
from .sglang import ServerSettings as ServerSettings
from .sglang import SGLangServers as SGLangServers
from .sglang import open_sglang_servers as open_sglang_servers
from .sources import IterableSource as IterableSource
from .sources import JsonlSource as JsonlSource
from .sources import TaskSource as TaskSource

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
