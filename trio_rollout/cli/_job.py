"""One run as the engine takes it, made from the options: source, generate function, reward, settings, servers.

The prompts are checked as a whole before anything is started. Without a server in the options, a tiny one is started in a
separate process.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

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

CliSource: TypeAlias = JsonlSource | TaskSource


@attrs.frozen(kw_only=True)
class ServerChoice:
    """The servers of a run. Without a URL and a router it is a tiny server, started for this run."""

    urls: tuple[str, ...] = ()
    router: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    api_key: str | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True, eq=False)
class Job:
    """Everything that one run needs."""

    source: CliSource
    generate: Generate
    reward: Reward
    servers: ServerChoice
    settings: EngineSettings
    identity: Mapping[str, str]
    """Options that must not change between the runs of one folder, which would hold results of two kinds otherwise.

    docs/decisions/0014-what-a-ledger-belongs-to.md
    """
    out: Path
    grace: float


def job_of(options: RunOptions) -> Job:
    """Return the job that the options describe.

    Raises:
      click.UsageError: options contradict each other, or name something that does not exist.
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
        identity=_identity_of(options),
        out=options.out,
        grace=options.grace,
    )


def source_of(options: RunOptions) -> CliSource:
    """Return the source that the options name.

    Raises:
      click.UsageError: there is no source or there are two, or NAME:COUNT has another form.
      SourceError: the file is missing or empty, or there is no such data set.

    """
    if options.tasks is not None and options.prompts is None:
        return _tasks(options.tasks, options.task_seed)
    if options.prompts is None or options.tasks is not None:
        raise click.UsageError("give either --prompts FILE.jsonl or --tasks NAME:COUNT")
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


def _identity_of(options: RunOptions) -> Mapping[str, str]:
    """Return the options that determine the results, by name. Deadlines, retries and servers do not."""
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
    """Return the servers that the options name."""
    return ServerChoice(
        urls=tuple(dict.fromkeys(options.server)),
        router=options.router,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        api_key=options.api_key,
    )


def _reward_of(options: RunOptions, source: Source) -> Reward:
    """Return the reward that the options name; by default the tasks' verifier, else ``exact_match``."""
    if options.reward is None and isinstance(source, TaskSource):
        return source.reward
    return resolve_reward(options.reward or "exact_match")


def _generate_of(options: RunOptions) -> Generate:
    """Return the generate function: one turn, or the user's function, with the sampling of the options."""
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
    """Return the engine's settings.

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
async def open_servers(choice: ServerChoice, *, say: Callable[[str], Awaitable[None]]) -> AsyncGenerator[SGLangServers]:
    """Open the servers of a run.

    Entering blocks until every server has described itself. Leaving ends the tiny server.

    Raises:
      ServerError: names each server that can't be reached or does not speak SGLang, with its answer.

    """
    async with AsyncExitStack() as stack:
        urls = choice.urls
        if not urls and choice.router is None:
            tiny = await stack.enter_async_context(open_tiny_process())
            await say(f"no --server given: started a tiny model at {tiny.url}")
            urls = (tiny.url,)
        settings = ServerSettings(vocab_size=choice.vocab_size, api_key=choice.api_key)
        yield await stack.enter_async_context(
            open_sglang_servers(urls, router=choice.router, tokenizer=choice.tokenizer, settings=settings)
        )
