"""One run as the engine takes it, made from the options: source, generate function, reward, settings, servers."""

from collections.abc import Mapping
from pathlib import Path

import attrs

from .. import SingleTurn
from .._core.sampling import SamplingParams
from .._core.settings import Deadlines, EngineSettings, Retry
from ..abc import Generate, Reward, Source
from ..sources import TaskSource
from ._names import resolve_generate, resolve_reward
from ._run_options import RunOptions
from ._servers import ServerChoice
from ._sources import CliSource, source_of


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
