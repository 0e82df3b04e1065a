"""What slime calls: a synchronous function, on its rollout manager's thread.

Owns the engines of this process, one for each data source: slime passes nothing between two calls that could hold one. This is
the one place of the project with state of the module, because a function found by its path has no other.
"""

import functools
import importlib
import os
import threading
from typing import Any, Final

from trio_rollout.errors import SettingsError

from ..thread import EngineThread
from ._arguments import Arguments
from ._life import Running, host_loop, open_host_engine
from ._plugins import load

_LOCK: Final = threading.Lock()
_ENGINES: Final[dict[tuple[int, int], tuple[Any, Any, EngineThread[Running]]]] = {}


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
    thread = _engine_for(args, data_source)
    types = importlib.import_module("slime.rollout.base_types")
    if evaluation:
        if getattr(args, "group_rm", False):
            raise SettingsError("--group-rm: evaluation has no groups")
        answers = thread.call(thread.value.evaluate)
        data = {
            answer.name: {"rewards": answer.rewards, "truncated": answer.truncated, "samples": answer.samples}
            for answer in answers
        }
        return types.RolloutFnEvalOutput(
            data=data, metrics={f"eval/{answer.name}-failed": answer.failed for answer in answers}
        )
    samples, metrics = thread.call(thread.value.train)
    if (path := getattr(args, "rollout_sample_filter_path", None)) is not None:
        load(path)(args, samples)
    return types.RolloutFnTrainOutput(samples=samples, metrics=metrics)


def _engine_for(args: Any, data_source: Any) -> EngineThread[Running]:
    key = (os.getpid(), id(data_source))
    with _LOCK:
        if key not in _ENGINES:
            read = Arguments(args)
            read.refuse_unsupported()
            lifespan = functools.partial(open_host_engine, read, data_source, host_loop())
            # Entered only when it runs: a failed start may be tried again. The data source is kept so that its id stays its own.
            _ENGINES[key] = (data_source, args, EngineThread(lifespan, name="trio-rollout slime").start())
        _, known, thread = _ENGINES[key]
    if known is not args and vars(known) != vars(args):
        raise SettingsError(
            "generate_rollout: this data source's engine runs with other args; call close_engines() first"
        )
    return thread


def close_engines() -> None:
    """Drain and close every engine of this process; unfinished groups go back to their data sources.

    Raises:
      BaseException: an engine's failure that no call had told.

    """
    with _LOCK:
        ours = [key for key in _ENGINES if key[0] == os.getpid()]
        threads = [_ENGINES.pop(key)[2] for key in ours]
    for thread in threads:
        thread.close(thread.grace)
