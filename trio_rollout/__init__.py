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

The names are imported when the first one is used: importing the engine takes half a second of processor time, which
``trio-rollout --help`` and programs that need one room only do not have to pay
(docs/decisions/0062-names-are-imported-when-the-first-is-used.md).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core.enums import CacheSalt, Cause, Leftovers, PauseMode, Resume, Status, Stop
    from ._core.sampling import SamplingParams
    from ._core.settings import Deadlines, Discard, EngineSettings, Pace, Retry, Staleness
    from ._core.statistics import EngineStatistics, ServerCounts, ServerStatistics
    from ._core.values import Failure, Group, GroupId, Prompt, QuarantineReport, Segment, Trajectory, Turn, VersionSpan
    from ._util.ports import Ports
    from .abc import Drop, Keep
    from .engine._delivery import Batch
    from .engine._engine import Batches, RolloutEngine, open_rollout_engine
    from .engine._rescoring import RescoredGroup, RescoreReport, rescore
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
    "rescore",
    "RescoreReport",
    "RescoredGroup",
    # the engine
    "open_rollout_engine",
    "RolloutEngine",
    "EngineSettings",
    "Resume",
    "Deadlines",
    "Retry",
    "Staleness",
    "Pace",
    "Discard",
    "Ports",
    "EngineStatistics",
    # weights
    "PauseMode",
    "CacheSalt",
    "WeightUpdate",
]


if not TYPE_CHECKING:  # a checker would take every name for one of the package

    def __getattr__(name: str) -> object:
        """Import the modules, and return a public name, or a room, which is an attribute then."""
        if not name.startswith("_"):  # Python itself asks for "__path__" and the like
            # ruff: disable[import-outside-top-level]  the point of this function
            from ._core import enums, sampling, settings, statistics, values
            from ._util import ports, threads
            from .engine import _delivery, _engine, _rescoring, _rollout, _weights
            from .ledger import _open
            from .rewards import _match, _processes
            from .sglang import _client, _settings
            from .sources import _iterable, _jsonl, _tasks

            # ruff: enable[import-outside-top-level]
            modules = (
                *(
                    enums,
                    sampling,
                    settings,
                    statistics,
                    values,
                    ports,
                    threads,
                    _delivery,
                    _engine,
                    _rescoring,
                    _rollout,
                    _weights,
                ),
                *(_open, _match, _processes, _client, _settings, _iterable, _jsonl, _tasks),
            )
            for module in modules if name in __all__ else ():
                if hasattr(module, name):
                    globals()[name] = getattr(module, name)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
