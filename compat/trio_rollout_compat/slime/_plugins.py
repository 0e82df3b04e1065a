"""The user's functions of a host: loaded once by their dotted paths, and called with the arguments that each takes."""

import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import attrs

from trio_rollout.errors import SettingsError

from ._arguments import Arguments


@functools.cache  # a path means the same function for the life of the process; the host itself looks it up for each sample
def load(path: str) -> Any:
    """Return the function at a dotted path.

    Raises:
      SettingsError: there is no such function.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"{path!r} cannot be imported as a function: {error}") from error


@attrs.frozen(eq=False)
class Plugins:
    """The user's functions. Async methods run on the host's loop: call them through the bridge."""

    args: Arguments

    def generate_path(self, sample: Any) -> str | None:
        """Return the path of the generate function for this sample: its own, else the flag's; None for the stock one."""
        path: str | None = getattr(sample, "generate_function_path", None) or self.args.custom_generate_function_path
        return path

    async def generate(self, path: str, sample: Any, sampling: dict[str, Any], *, evaluation: bool) -> Any:
        """Call a custom generate function; with ``evaluation`` if it has such a parameter."""
        fn = load(path)
        more = {"evaluation": evaluation} if "evaluation" in inspect.signature(fn).parameters else {}
        return await fn(self.args.given, sample, sampling, **more)

    async def score(self, samples: Sequence[Any], *, batched: bool) -> None:
        """Set each sample's reward, unless it has one. ``batched``: one call for all, as for groups and fan-out."""
        wanted = [sample for sample in samples if sample.reward is None]
        if not wanted:
            return
        if batched:
            rewards = await self._scorer(wanted[0], batched=True)(self.args.given, wanted)
            for sample, reward in zip(wanted, rewards, strict=True):
                sample.reward = reward
        else:
            wanted[0].reward = await self._scorer(wanted[0], batched=False)(self.args.given, wanted[0])

    def _scorer(self, sample: Any, *, batched: bool) -> Any:
        path = getattr(sample, "custom_rm_path", None) or self.args.custom_rm_path
        return load(path) if path is not None else self.stock_scorer(batched=batched)

    def stock_scorer(self, *, batched: bool) -> Any:
        """Return the host's own reward function, for one sample or for several."""
        return load(f"{self.args.host}.rollout.rm_hub.{'batched_async_rm' if batched else 'async_rm'}")

    async def verdict(self, made: list[Any]) -> str | None:
        """Return the reason for which the dynamic filter drops a group, or None if it keeps the group."""
        said = load(self.args.dynamic_sampling_filter_path)(self.args.given, made)
        keep, reason = getattr(said, "keep", said), getattr(said, "reason", None)
        return None if keep else str(reason or "unnamed")
