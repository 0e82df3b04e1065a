"""What slime calls: a synchronous function, on its rollout manager's thread."""

from typing import Any

from trio_rollout.errors import SettingsError

from ..thread import EngineThread
from ._arguments import Arguments
from ._engines import engine_for
from ._life import Running
from ._plugins import Plugins, load


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


def trained_by(thread: EngineThread[Running], args: Arguments, weight_version: int | None = None) -> Any:
    """The host's ``RolloutFnTrainOutput`` of the next batch."""
    samples, metrics = thread.call(thread.value.train, weight_version)
    if (path := args.rollout_sample_filter_path) is not None:
        load(path)(args.given, samples)
    return args.module("rollout.base_types").RolloutFnTrainOutput(samples=samples, metrics=metrics)


def evaluated_by(thread: EngineThread[Running], args: Arguments) -> Any:
    """The host's ``RolloutFnEvalOutput`` of all datasets.

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
