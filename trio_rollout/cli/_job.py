"""The servers of a run: those that were named, or a tiny one in a process of its own.

The prompts of a run: the source that the options name, checked as a whole before anything is started.

One run as the engine takes it, made from the options: source, generate function, reward, settings, servers.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import attrs
import click
import trio

from .. import SingleTurn
from .._core.sampling import SamplingParams
from .._core.settings import Deadlines, EngineSettings, Retry
from ..abc import Generate, Reward, Source
from ..errors import SourceError
from ..sglang import ServerSettings, SGLangServers, open_sglang_servers
from ..sources import JsonlSource, TaskSource
from ..tiny import open_tiny_process
from ._names import resolve_generate, resolve_reward
from ._options import RunOptions


@attrs.frozen(kw_only=True)
class ServerChoice:
    """Which servers a run uses; no URL and no router: a tiny server of its own."""

    urls: tuple[str, ...] = ()
    router: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    api_key: str | None = attrs.field(default=None, repr=False)


@asynccontextmanager
async def open_servers(choice: ServerChoice, *, say: Callable[[str], Awaitable[None]]) -> AsyncGenerator[SGLangServers]:
    """The servers, each of which has said who it is.

    Entering blocks until they have. Leaving ends the tiny server.

    Raises:
      ServerError: names each server that can't be reached or does not speak SGLang, with what it said.

    """
    async with AsyncExitStack() as stack:
        urls = choice.urls
        if not urls and choice.router is None:
            tiny = await stack.enter_async_context(open_tiny_process())
            await say(f"no --server given: a tiny model answers at {tiny.url}")
            urls = (tiny.url,)
        settings = ServerSettings(vocab_size=choice.vocab_size, api_key=choice.api_key)
        yield await stack.enter_async_context(
            open_sglang_servers(urls, router=choice.router, tokenizer=choice.tokenizer, settings=settings)
        )


CliSource = JsonlSource | TaskSource


def source_of(options: RunOptions) -> CliSource:
    """The source that the options name.

    Raises:
      click.UsageError: none is named, or two; or NAME:COUNT has another form.
      SourceError: the file is missing or empty, or there is no such data set.

    """
    if options.tasks is not None and options.prompts is None:
        return _tasks(options.tasks, options.task_seed)
    if options.prompts is None or options.tasks is not None:
        raise click.UsageError("one of --prompts FILE.jsonl and --tasks NAME:COUNT is needed")
    return JsonlSource(
        options.prompts,
        prompt_key=options.prompt_key,
        label_key=options.label_key,
        metadata_key=options.metadata_key,
        id_key=options.id_key,
        epochs=options.epochs,
        shuffle_seed=options.shuffle_seed,
    )


def _tasks(spec: str, seed: int) -> TaskSource:
    name, _, count = spec.rpartition(":")
    if not name or not count.isdecimal() or not int(count):
        raise click.UsageError(f"--tasks {spec!r}: expected NAME:COUNT, for example gcd:100")
    return TaskSource(name, count=int(count), seed=seed)


async def checked_total(source: CliSource, *, tokenizer: str | None) -> int | None:
    """Check the whole source and count its prompts; its position stays.

    Blocks while the file is read. Messages without a tokenizer are refused here, not prompt by prompt: a prompt that no
    server takes is given up for good, and this one needs only an option.

    Raises:
      SourceError: a line is no prompt, or two have one id, or the prompts are messages and there is no tokenizer.

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


@attrs.frozen(kw_only=True, eq=False)
class Job:
    """What one run does, with what, into which folder."""

    source: CliSource
    generate: Generate
    reward: Reward
    servers: ServerChoice
    settings: EngineSettings
    same: Mapping[str, str]
    """What must not change between the runs of one folder: it would hold results of two kinds."""
    out: Path
    grace: float


def job_of(options: RunOptions) -> Job:
    """What the options say.

    Raises:
      click.UsageError: they contradict each other or name something that is not there.
      SettingsError: a value is out of its range.
      SourceError: there are no prompts.

    """
    source = source_of(options)
    return Job(
        source=source,
        generate=_generate_of(options),
        reward=_reward_of(options, source),
        servers=_servers_of(options),
        settings=_settings_of(options),
        same=_same_of(options),
        out=options.out,
        grace=options.grace,
    )


def _same_of(options: RunOptions) -> Mapping[str, str]:
    """The options that say what a result is, rather than how it is come by, under their names."""
    return {
        "reward": options.reward or ("exact_match" if options.tasks is None else "the tasks' own"),
        "generate": options.generate or "one turn",
        "max_new_tokens": str(options.max_new_tokens),
        "temperature": str(options.temperature),
        "top_p": str(options.top_p),
        "top_k": str(options.top_k),
        "stop": ", ".join(map(repr, options.stop)) or "none",
    }


def _servers_of(options: RunOptions) -> ServerChoice:
    """The servers that the options name."""
    return ServerChoice(
        urls=tuple(dict.fromkeys(options.server)),
        router=options.router,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        api_key=options.api_key,
    )


def _reward_of(options: RunOptions, source: Source) -> Reward:
    """The reward that the options name; by default the tasks' own verifier, else ``exact_match``."""
    if options.reward is None and isinstance(source, TaskSource):
        return source.reward
    return resolve_reward(options.reward or "exact_match")


def _generate_of(options: RunOptions) -> Generate:
    """The generate function: one turn, or the user's own, with the sampling of the options."""
    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        stop=options.stop,
    )
    if options.generate is None:
        return SingleTurn(sampling)
    return resolve_generate(options.generate, sampling)


def _settings_of(options: RunOptions) -> EngineSettings:
    """The engine's settings.

    Raises:
      SettingsError: a value is out of its range.

    """
    usual = EngineSettings()
    return EngineSettings(
        samples_per_prompt=options.samples,
        max_running=max(usual.max_running, options.samples) if options.max_running is None else options.max_running,
        deadlines=Deadlines(group=options.group_deadline, turn=options.turn_deadline, reward=options.reward_deadline),
        retry=Retry(max_attempts=options.max_attempts),
        failure_budget=options.failure_budget,
    )
