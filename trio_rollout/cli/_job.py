"""One run as the engine takes it, made from the options: source, generate function, reward, settings, servers.

The prompts are checked as a whole before anything is started. Without a server in the options, a tiny one is started in a
separate process. The functions at the end find rewards and generate functions by their names: only here does the package
turn a string into code.
"""

import importlib
import inspect
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast, final

import attrs
import click
import msgspec
import trio

from .. import SingleTurn
from .._core.enums import Resume
from .._core.sampling import SamplingParams
from .._core.settings import Deadlines, EngineSettings, Retry
from .._core.values import Prompt, Trajectory
from .._http import parse_url
from .._util.threads import run_in_thread
from ..abc import Generate, Reward, Rollout, Source
from ..errors import SourceError
from ..rewards import exact_match, in_thread, regex_reward
from ..sglang import ServerSettings, SGLangServers, open_sglang_servers
from ..sources import JsonlSource, TaskSource
from ..tiny import open_tiny_process
from ..tokenizer import Tokenizer, load_tokenizer
from ..tokenizer._tokenizer import require_variables
from ._options import RunOptions

CliSource: TypeAlias = JsonlSource | TaskSource
AnyCallable: TypeAlias = Callable[..., Any]
TASKS_OWN = "the tasks' own"
"""The name of the reward that generated tasks bring along."""


@attrs.frozen(kw_only=True, eq=False)
class Job:
    """Everything that one run needs, beside its servers: ``open_servers`` takes those from the options."""

    options: RunOptions
    source: CliSource
    generate: Generate
    reward: Reward
    settings: EngineSettings
    identity: Mapping[str, str]
    """Options that must not change between the runs of one folder, which would hold results of two kinds otherwise.

    docs/decisions/0014-what-a-ledger-belongs-to.md
    """


def job_of(options: RunOptions) -> Job:
    """Return the job that the options describe.

    Raises:
      click.UsageError: options contradict each other, or name something that does not exist.
      SettingsError: a value is out of its range.
      SourceError: there are no prompts.
    """
    for url in options.server if options.router is None else (*options.server, options.router):
        parse_url(url)
    source = _source_of(options)
    require_variables(template_variables(options.template_variable), "--template-variable")
    if options.template_variable and options.tokenizer is None:
        raise click.UsageError("--template-variable: --tokenizer PATH is needed, whose chat template has the variables")
    return Job(
        options=options,
        source=source,
        generate=_generate_of(options),
        reward=_reward_of(options, source),
        settings=_settings_of(options),
        identity=_identity_of(options),
    )


def _source_of(options: RunOptions) -> CliSource:
    if options.tasks is not None and options.prompts is None:
        return _tasks(options.tasks, options.task_seed)
    if options.tasks is not None:
        raise click.UsageError(
            f"give either --prompts FILE.jsonl or --tasks NAME:COUNT, not both: got {options.prompts} and {options.tasks}, "
            "perhaps one of them by --config"
        )
    if options.prompts is None:
        raise click.UsageError("give either --prompts FILE.jsonl or --tasks NAME:COUNT")
    return JsonlSource(
        options.prompts,
        prompt_key=options.prompt_key,
        label_key=options.label_key,
        metadata_key=options.metadata_key,
        tools_key=options.tools_key or None,
        id_key=options.id_key,
        epochs=options.epochs,
        shuffle_seed=options.shuffle_seed,
    )


def _tasks(spec: str, seed: int) -> TaskSource:
    name, _, count = spec.rpartition(":")
    if not name or not count.isdecimal() or not int(count):
        raise click.UsageError(f"--tasks {spec!r}: expected NAME:COUNT, for example gcd:100")
    return TaskSource(name, count=int(count), seed=seed)


def _identity_of(options: RunOptions) -> Mapping[str, str]:
    """Return the options that determine the results, by name. Deadlines, retries and servers do not."""
    return {
        "reward": options.reward or ("exact_match" if options.tasks is None else TASKS_OWN),
        "generate": options.generate or "one turn",
        "max_new_tokens": str(options.max_new_tokens),
        "temperature": str(options.temperature),
        "top_p": str(options.top_p),
        "top_k": str(options.top_k),
        "stop": ", ".join(map(repr, options.stop)) or "none",
        # Results of older versions have no entry.
        **({"template_variable": ", ".join(options.template_variable)} if options.template_variable else {}),
    }


def _reward_of(options: RunOptions, source: Source) -> Reward:
    """Return the reward that the options name; by default the tasks' verifier, else ``exact_match``."""
    if options.reward is None and isinstance(source, TaskSource):
        return source.reward
    return resolve_reward(options.reward or "exact_match")


def _generate_of(options: RunOptions) -> Generate:
    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        stop=options.stop,
    )
    return SingleTurn(sampling) if options.generate is None else resolve_generate(options.generate, sampling)


def _settings_of(options: RunOptions) -> EngineSettings:
    usual = EngineSettings()
    return EngineSettings(
        samples_per_prompt=options.samples,
        max_running=max(usual.max_running, options.samples) if options.max_running is None else options.max_running,
        deadlines=Deadlines(group=options.group_deadline, turn=options.turn_deadline, reward=options.reward_deadline),
        retry=Retry(max_attempts=options.max_attempts),
        failure_budget=options.failure_budget,
        resume=Resume(options.resume),
    )


async def checked_total(source: CliSource, *, tokenizer: str | None) -> int | None:
    """Check the whole source and return the number of its prompts. The source's position is unchanged.

    Blocks while the file is read. Messages without a tokenizer are refused here and not prompt by prompt: a prompt that no
    server accepts is quarantined for good, and these need only an option.

    Raises:
      SourceError: a line is no prompt, two lines have the same id, or messages come without a tokenizer.
    """
    await trio.lowlevel.checkpoint()
    if isinstance(source, TaskSource):
        return source.count
    await source.check()
    if tokenizer is None:
        begin = source.state()
        for prompt in await source.take(1):
            if prompt.messages is not None:
                raise SourceError(f"{source.path}: the prompts are messages; --tokenizer PATH is needed to encode them")
        source.restore(begin)
    return source.total


@asynccontextmanager
async def open_servers(options: RunOptions, *, say: Callable[[str], Awaitable[None]]) -> AsyncGenerator[SGLangServers]:
    """Open the servers of a run: without a URL and a router a tiny one, started for this run.

    Entering blocks until every server has described itself. Leaving ends the tiny server.

    Raises:
      ServerError: names each server that can't be reached or does not speak SGLang, with its answer.
    """
    async with AsyncExitStack() as stack:
        urls = tuple(dict.fromkeys(options.server))
        if not urls and options.router is None:
            tiny = await stack.enter_async_context(open_tiny_process())
            await say(f"no --server given: started a tiny model at {tiny.url}")
            urls = (tiny.url,)
        tokenizer = await _tokenizer_of(options)
        settings = ServerSettings(vocab_size=options.vocab_size, api_key=options.api_key)
        yield await stack.enter_async_context(
            open_sglang_servers(urls, router=options.router, tokenizer=tokenizer, settings=settings)
        )


async def _tokenizer_of(options: RunOptions) -> str | Tokenizer | None:
    """Return the tokenizer's folder, or the tokenizer if its chat template has variables."""
    await trio.lowlevel.checkpoint()
    if not options.template_variable or options.tokenizer is None:
        return options.tokenizer
    variables = template_variables(options.template_variable)
    return await run_in_thread(partial(load_tokenizer, options.tokenizer, variables=variables))


def template_variables(given: Sequence[str]) -> dict[str, object]:
    """Return the chat template's variables by name.

    Raises:
      click.UsageError: one is not NAME=JSON.
    """
    variables: dict[str, object] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            variables[name] = msgspec.json.decode(value)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            wanted = "expected NAME=JSON, for example enable_thinking=false"
            raise click.UsageError(f"--template-variable {text!r}: {wanted}: {error}") from error
        if not name.isidentifier():
            raise click.UsageError(f"--template-variable {text!r}: {name!r} is no name of a variable")
    return variables


def resolve_reward(spec: str) -> Reward:
    """Return the scorer for ``exact_match``, ``regex:PATTERN`` or ``module:function``; a sync function runs in a thread.

    Raises:
      click.BadParameter: the name has another form, or the pattern or the function is unusable.
    """
    if spec == "exact_match":
        return exact_match
    if spec.startswith("regex:"):
        try:
            return regex_reward(spec.removeprefix("regex:"))
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    function = load_callable(spec)
    return cast("Reward", function) if is_async(function) else in_thread(function)


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
        raise click.BadParameter(f"{spec!r}: importing {name!r} failed: {type(error).__name__}: {error}") from error  # noqa: ASYNC104  a real cancellation was raised again above


def is_async(function: AnyCallable) -> bool:
    """Return True if a call must be awaited: an ``async def``, a partial of one, or an object with an async ``__call__``."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # ruff: ignore[unreliable-callable-check]  the method itself is wanted
    )
