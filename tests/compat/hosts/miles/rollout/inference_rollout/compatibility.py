"""Stand-in for miles's loaders: classes, functions of one input, functions with slime's signature."""

import importlib
import inspect

from miles.rollout.base_types import GenerateFnOutput
from miles.utils.async_utils import run


def load_function(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def load_rollout_function(given, path):
    """For a class only: a function would get slime's four arguments."""
    return load_function(path)(given)


def call_rollout_function(fn, given):
    output = fn(given)
    return run(output) if inspect.iscoroutine(output) else output


class LegacyGenerateFnAdapter:
    def __init__(self, fn):
        self.fn = fn
        self.more = "evaluation" in inspect.signature(fn).parameters

    async def __call__(self, given):
        more = {"evaluation": given.evaluation} if self.more else {}
        output = await self.fn(given.args, given.sample, given.sampling_params, **more)
        return output if isinstance(output, GenerateFnOutput) else GenerateFnOutput(samples=output)


def load_generate_function(path):
    if path is None:
        return None
    fn = load_function(path)
    if inspect.isclass(fn):
        return fn()
    names = list(inspect.signature(fn).parameters)
    return LegacyGenerateFnAdapter(fn) if len(names) >= 3 and names[0] != "input" else fn
