"""miles's rollout function: a class that miles makes once and calls on worker threads of its rollout manager.

Training and evaluation may be called at the same time. Generate functions take one input object here, and rewards find the
user's function themselves.
"""

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, Final, final

import attrs

from trio_rollout.errors import SettingsError

from ..slime._adapters import Plugins
from ..slime._arguments import ARGUMENTS, Arguments
from ..slime._arguments import add_arguments as add_flags
from ..slime._engine import close_engines, engine_for, evaluated_by, trained_by


@attrs.frozen(eq=False)
class MilesPlugins(Plugins):
    """The user's functions, loaded and called by miles's own loaders, so that classes and older signatures work as there."""

    _states: list[Any] = attrs.field(factory=list, init=False)

    async def generate(self, path: str, sample: Any, sampling: dict[str, Any], *, evaluation: bool) -> Any:
        """Call a custom generate function: the class-based kind, or one with slime's signature."""
        fn = self.args.module("rollout.inference_rollout.compatibility").load_generate_function(path)
        given = self.args.module("rollout.base_types").GenerateFnInput(
            state=self._state(), sample=sample, sampling_params=sampling, evaluation=evaluation
        )
        return (await fn(given)).samples

    def _state(self) -> Any:
        """Return miles's ``GenerateState``: made once, on miles's loop, where its semaphore belongs."""
        if not self._states:
            common = self.args.module("rollout.inference_rollout.inference_rollout_common")
            self._states.append(common.GenerateState(self.args.given))
        return self._states[0]

    def _scorer(self, sample: Any, *, batched: bool) -> Any:
        del sample  # miles's reward hub reads the sample's own wishes
        return self.stock_scorer(batched=batched)


MORE_ARGUMENTS: Final[Mapping[str, object]] = {
    "max_weight_staleness": None,
    "async_max_concurrent_samples": None,
    "chat_template_path": None,
}
"""Attributes of miles's ``args`` that are read beyond slime's, with the default for versions of miles that lack them."""


@final
class TrioRolloutFn:
    """``--rollout-function-path trio_rollout_compat.miles.TrioRolloutFn``; for ``--eval-function-path`` as well.

    The first call opens the engine, which goes on producing between the calls, until ``close``, or the end of the process.
    Instances for the same data source share it.
    """

    def __init__(self, input: Any) -> None:  # ruff: ignore[builtin-argument-shadowing]  miles's name
        """``input`` is miles's ``RolloutFnConstructorInput``.

        Raises:
          SettingsError: a flag is out of its range or would be ignored.
        """
        self._data_source = input.data_source
        self._plugins = MilesPlugins(Arguments(input.args, "miles", {**ARGUMENTS, **MORE_ARGUMENTS}))
        self._plugins.args.refuse_unsupported()

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Add this package's flags: miles's hook."""
        add_flags(parser)

    def __call__(self, input: Any) -> Any:  # ruff: ignore[builtin-argument-shadowing]  miles's name
        """Answer a ``RolloutFnTrainInput`` or ``RolloutFnEvalInput``. Blocks, so call it on a worker thread, as miles does.

        A training call says which weights the servers have; with ``--max-weight-staleness`` older groups are sampled again.

        Raises:
          SettingsError: evaluation was asked for on other servers, or this data source was used with other ``args``.
          EngineClosed: the engine has failed; the cause is its failure.
          Exception: the engine's own failure, such as an exhausted failure budget.
        """
        args = self._plugins.args
        if input.evaluation and getattr(input, "generate_state", None) is not None:
            raise SettingsError("evaluation on separate servers (generate_state): give another --eval-function-path")
        thread = engine_for(self._plugins, self._data_source)
        if input.evaluation:
            return evaluated_by(thread, args)
        return trained_by(thread, args, getattr(input, "weight_version", None))

    def close(self) -> None:
        """Drain and close this data source's engine; unfinished groups go back. Called by miles at its end, if it does that."""
        close_engines(self._data_source)
