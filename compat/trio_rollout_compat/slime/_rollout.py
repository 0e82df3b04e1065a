"""slime's rollout function, and the engines of this process, one for each data source.

slime calls a synchronous function, found by its dotted path, on its rollout manager's thread. It passes nothing between two
calls that could hold an engine, so the engines are kept in this module: the one place of the project with module state.
"""

import functools
import os
import threading
from typing import Any, Final

from trio_rollout.errors import SettingsError

from ..thread import EngineThread
from ._arguments import Arguments
from ._engine import HostEngine, host_loop, open_host_engine
from ._plugins import Plugins, load

_LOCK: Final = threading.Lock()
_ENGINES: Final[dict[tuple[int, int], tuple[Any, Any, EngineThread[HostEngine]]]] = {}


def engine_for(plugins: Plugins, data_source: Any) -> EngineThread[HostEngine]:
    """Return the engine of this data source; open it at the first call. From any thread; other calls wait meanwhile.

    Raises:
      SettingsError: a flag is out of its range or would be ignored, or the data source's engine runs with other ``args``.
    """
    key, args = (os.getpid(), id(data_source)), plugins.args
    with _LOCK:
        if key not in _ENGINES:
            args.refuse_unsupported()
            lifespan = functools.partial(open_host_engine, plugins, data_source, host_loop(args))
            thread = EngineThread(lifespan, name=f"trio-rollout {args.host}")
            # Entered only when it runs: a failed start may be tried again. The data source is kept, so that its id is not reused.
            _ENGINES[key] = (data_source, args.given, thread.start())
        _, known, thread = _ENGINES[key]
    if known is not args.given and vars(known) != vars(args.given):
        raise SettingsError("this data source's engine runs with other args; call close_engines() first")
    return thread


def close_engines(data_source: Any = None) -> None:
    """Drain and close every engine of this process, or that of one data source; unfinished groups go back to their source.

    Raises:
      BaseException: an engine's failure that was not raised to a caller before.
    """
    with _LOCK:
        wanted = [
            key for key in _ENGINES if key[0] == os.getpid() and (data_source is None or key[1] == id(data_source))
        ]
        threads = [_ENGINES.pop(key)[2] for key in wanted]
    for thread in threads:
        thread.close(thread.grace)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:  # ruff: ignore[boolean-type-hint-positional-argument, boolean-default-value-positional-argument]  slime's signature
    """``--rollout-function-path trio_rollout_compat.slime.generate_rollout``; for ``--eval-function-path`` as well.

    The first call opens the engine, which goes on producing between the calls, until the process ends or ``close_engines``.
    Blocks until ``rollout_batch_size`` groups are there, or everything is evaluated.

    Raises:
      SettingsError: a flag is out of its range or would be ignored, or this data source was used with other ``args`` before.
      EngineClosed: the engine has failed; the cause is its failure.
      Exception: the engine's own failure, such as an exhausted failure budget.
    """
    del rollout_id
    read = Arguments(args)
    thread = engine_for(Plugins(read), data_source)
    return evaluated_by(thread, read) if evaluation else trained_by(thread, read)


def trained_by(thread: EngineThread[HostEngine], args: Arguments, weight_version: int | None = None) -> Any:
    """Return the next batch as the host's ``RolloutFnTrainOutput``."""
    samples, metrics = thread.call(thread.value.train, weight_version)
    if (path := args.rollout_sample_filter_path) is not None:
        load(path)(args.given, samples)
    return args.module("rollout.base_types").RolloutFnTrainOutput(samples=samples, metrics=metrics)


def evaluated_by(thread: EngineThread[HostEngine], args: Arguments) -> Any:
    """Evaluate all datasets and return the host's ``RolloutFnEvalOutput``.

    Raises:
      SettingsError: ``--group-rm`` was given.
    """
    if args.group_rm:
        raise SettingsError("--group-rm: evaluation has no groups")
    answers = thread.call(thread.value.evaluate)
    data = {
        answer.name: {"rewards": answer.rewards, "truncated": answer.truncated, "samples": answer.samples}
        for answer in answers
    }
    metrics = {f"eval/{answer.name}-failed": answer.failed for answer in answers}
    return args.module("rollout.base_types").RolloutFnEvalOutput(data=data, metrics=metrics)
