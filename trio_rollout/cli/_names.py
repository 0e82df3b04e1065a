"""Rewards and generate functions by their names on the command line. Only here does the package turn a string into code."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast, final

import attrs
import click

from .._core.sampling import SamplingParams
from .._core.values import Prompt, Trajectory
from ..abc import Generate, Reward, Rollout
from ..rewards import exact_match, in_thread, regex_reward

AnyCallable: TypeAlias = Callable[..., Any]

_REGEX = "regex:"


def resolve_reward(spec: str) -> Reward:
    """Return the scorer for ``exact_match``, ``regex:PATTERN`` or ``module:function``; a sync function runs in a thread.

    Raises:
      click.BadParameter: the name has another form, or the pattern or the function is unusable.

    """
    if spec == "exact_match":
        return exact_match
    if spec.startswith(_REGEX):
        return _regex(spec.removeprefix(_REGEX))
    function = load_callable(spec)
    if is_async(function):
        return cast("Reward", function)
    return in_thread(function)


def _regex(pattern: str) -> Reward:
    try:
        return regex_reward(pattern)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def resolve_generate(spec: str, sampling: SamplingParams) -> Generate:
    """Return the async generate function for ``module:function``, with this ``sampling`` unless it has that attribute.

    Raises:
      click.BadParameter: the function can't be found, or is not async.

    """
    function = load_callable(spec)
    if not is_async(function):
        raise click.BadParameter(
            f"{spec!r}: the function must be async: async def {spec.rpartition(':')[2]}(prompt, rollout)"
        )
    return cast("Generate", function) if hasattr(function, "sampling") else SampledBy(function, sampling)


@final
@attrs.frozen(eq=False)
class SampledBy:
    """A generate function with default sampling parameters."""

    function: Generate
    sampling: SamplingParams

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Run one rollout."""
        return await self.function(prompt, rollout)


def load_callable(spec: str) -> AnyCallable:
    """Return the callable that ``module:name`` or ``module:object.name`` names.

    Raises:
      click.BadParameter: the name has another form, the import failed, there is no such name, or it is not callable.

    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise click.BadParameter(f"{spec!r}: expected module:function")
    found = _module(module_name, spec)
    for part in path.split("."):
        if not hasattr(found, part):
            raise click.BadParameter(f"{spec!r}: {module_name!r} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise click.BadParameter(f"{spec!r}: a {type(found).__name__} is not callable")
    return cast("AnyCallable", found)


def _module(name: str, spec: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:  # an installed script's path lacks the current folder, `python -m` has it
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise click.BadParameter(
            f"{spec!r}: can't import {error.name!r} (searched: {here} and the installed packages)"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may exit or raise any class; its exit status is not this command's
        raise click.BadParameter(f"{spec!r}: importing {name!r} failed: {type(error).__name__}: {error}") from error


def is_async(function: AnyCallable) -> bool:
    """Return True if a call must be awaited: an ``async def``, a partial of one, or an object with an async ``__call__``."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # ruff: ignore[unreliable-callable-check]  the method itself is wanted
    )
