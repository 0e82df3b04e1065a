"""miles's plug-ins: generate functions that take one input object, and rewards that find the user's function themselves."""

from typing import Any

import attrs

from ..slime._plugins import Plugins


@attrs.frozen(eq=False)
class MilesPlugins(Plugins):
    """The user's functions, found and called by miles's own loaders, so that classes and older signatures work as they do there."""

    _states: list[Any] = attrs.field(factory=list, init=False)

    async def generate(self, path: str, sample: Any, sampling: dict[str, Any], *, evaluation: bool) -> Any:
        """Call a custom generate function: the class-based kind, or one with slime's signature."""
        fn = self.args.module("rollout.inference_rollout.compatibility").load_generate_function(path)
        given = self.args.module("rollout.base_types").GenerateFnInput(
            state=self._state(), sample=sample, sampling_params=sampling, evaluation=evaluation
        )
        return (await fn(given)).samples

    def _state(self) -> Any:
        """The ``GenerateState`` of miles: made once, on miles's loop, where its semaphore belongs."""
        if not self._states:
            common = self.args.module("rollout.inference_rollout.inference_rollout_common")
            self._states.append(common.GenerateState(self.args.given))
        return self._states[0]

    def _scorer(self, sample: Any, *, batched: bool) -> Any:
        del sample  # miles's reward hub reads the sample's own wishes
        return self.stock_scorer(batched=batched)
