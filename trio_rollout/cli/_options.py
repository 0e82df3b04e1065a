"""The command ``trio-rollout run`` and its options, each once with its help, and their values as one typed object.

A TOML file can give them too (``--config``): its keys are the options' names with underscores. Options on the command line
take precedence. Nothing is guessed: an unknown key or a value of another type is an error that names the file and the key.
"""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click

from .._core.enums import Resume
from .._core.sampling import SamplingParams
from .._core.settings import Deadlines, EngineSettings, Retry

F = TypeVar("F", bound=Callable[..., Any])

_SAMPLING, _ENGINE, _DEADLINES, _RETRY = SamplingParams(), EngineSettings(), Deadlines(), Retry()


@attrs.frozen(kw_only=True)
class RunOptions:
    """The values of the options: click has checked their types, names are not resolved yet."""

    prompts: Path | None
    tasks: str | None
    task_seed: int
    prompt_key: str
    label_key: str
    metadata_key: str
    tools_key: str
    id_key: str | None
    epochs: int
    shuffle_seed: int | None
    server: tuple[str, ...]
    router: str | None
    tokenizer: str | None
    template_variable: tuple[str, ...]
    vocab_size: int | None
    api_key: str | None = attrs.field(repr=False)
    reward: str | None
    generate: str | None
    samples: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    max_running: int | None
    group_deadline: float
    turn_deadline: float
    reward_deadline: float
    max_attempts: int
    failure_budget: int
    resume: str
    grace: float
    out: Path
    retry_quarantined: bool
    progress_every: float
    quiet: bool
    no_progress: bool


def option(name: str, help: str, **settings: Any) -> Callable[[F], F]:  # ruff: ignore[builtin-argument-shadowing]  as click's
    """Return click's decorator for an option; its help names the default."""
    return click.option(name, help=help, show_default=True, **settings)


COUNT = click.IntRange(min=1)
WHOLE = click.IntRange(min=0)
_NUMBER = click.FloatRange(min=0)


def _seconds(name: str, default: float | None, help: str) -> Callable[[F], F]:  # ruff: ignore[builtin-argument-shadowing]
    return option(name, help, type=_NUMBER, default=default, metavar="SECONDS")


_OPTIONS = (  # in the order of the help
    option(
        "--prompts",
        "File with one JSON object a line: the prompt as text, token ids or messages (messages need --tokenizer), "
        "and optionally a label, metadata and an id.",
        type=click.Path(path_type=Path),
        metavar="FILE.jsonl",
    ),
    option(
        "--tasks",
        "Instead of --prompts: COUNT generated tasks of the reasoning-gym data set NAME (gcd:100). The data set's "
        "verifier is the reward unless --reward is given. Needs the extra 'tasks'.",
        metavar="NAME:COUNT",
    ),
    option("--task-seed", "Seed of the generated tasks.", type=WHOLE, default=0),
    option("--prompt-key", "Key of the prompt in each JSON object.", default="prompt", metavar="KEY"),
    option("--label-key", "Key of the label, for the reward.", default="label", metavar="KEY"),
    option("--metadata-key", "Key of the metadata, a JSON object.", default="metadata", metavar="KEY"),
    option(
        "--tools-key",
        "Key of the tools that a prompt of messages offers; an empty KEY reads none.",
        default="tools",
        metavar="KEY",
    ),
    option("--id-key", "Key of a unique id. Default: prompts are numbered from 0.", metavar="KEY"),
    option("--epochs", "Number of passes over the prompts.", type=COUNT, default=1),
    option("--shuffle-seed", "Seed to shuffle the prompts in each epoch. Default: file order.", type=WHOLE),
    option(
        "--server",
        "URL of an SGLang server; may be repeated. Default: a tiny model in a separate process, for the length of the run.",
        multiple=True,
        metavar="URL",
    ),
    option("--router", "URL of an SGLang router; its servers are discovered and used directly.", metavar="URL"),
    option(
        "--tokenizer",
        "Folder with tokenizer.json and a chat template, to encode texts and messages here.",
        metavar="PATH",
    ),
    option(
        "--template-variable",
        "Variable of the tokenizer's chat template, its value as JSON (enable_thinking=false); may be repeated.",
        multiple=True,
        metavar="NAME=JSON",
    ),
    option(
        "--vocab-size",
        "Refuse token ids of this number and above before they are sent. Default: from the server's model.",
        type=COUNT,
    ),
    option(
        "--api-key",
        "Bearer token for the servers. Safer in the environment: other users can read a command line.",
        envvar="TRIO_ROLLOUT_API_KEY",
        show_envvar=True,
        metavar="KEY",
    ),
    option(
        "--samples",
        "Rollouts of each prompt; together they are a group.",
        type=COUNT,
        default=_ENGINE.samples_per_prompt,
    ),
    option(
        "--reward",
        "Score of a rollout: exact_match (the answer equals the label), regex:PATTERN (the answer matches the "
        "pattern), or module:function, sync or async, called with the trajectory. Default: exact_match.",
        metavar="NAME",
    ),
    option(
        "--generate",
        "Async function (prompt, rollout) -> trajectory. Default: one turn a rollout.",
        metavar="module:function",
    ),
    option("--max-new-tokens", "Most new tokens of one answer.", type=WHOLE, default=_SAMPLING.max_new_tokens),
    option("--temperature", "Sampling temperature; 0 is greedy.", type=_NUMBER, default=_SAMPLING.temperature),
    option(
        "--top-p",
        "Sample from the most likely tokens with this total probability.",
        type=click.FloatRange(min=0, max=1, min_open=True),
        default=_SAMPLING.top_p,
    ),
    option(
        "--top-k",
        "Sample from this number of most likely tokens; -1: from all.",
        type=click.IntRange(min=-1),
        default=_SAMPLING.top_k,
    ),
    option("--stop", "Text that ends an answer; may be repeated.", multiple=True, metavar="TEXT"),
    option(
        "--max-running",
        f"Most rollouts at once, over all servers. Default: {_ENGINE.max_running}, or --samples if that is more.",
        type=COUNT,
    ),
    _seconds("--group-deadline", _DEADLINES.group, "Time limit of one attempt at a group, in all; 0: no limit."),
    _seconds("--turn-deadline", _DEADLINES.turn, "Time limit of one answer of a server; 0: no limit."),
    _seconds("--reward-deadline", _DEADLINES.reward, "Time limit for scoring one rollout; 0: no limit."),
    option(
        "--max-attempts",
        "A group whose attempts fail this often (errors, deadlines) is quarantined: it is not tried again.",
        type=COUNT,
        default=_RETRY.max_attempts,
    ),
    option(
        "--failure-budget",
        "The run fails when this number of groups was quarantined in a row.",
        type=COUNT,
        default=_ENGINE.failure_budget,
    ),
    option(
        "--resume",
        "What a sample that begins anew does not sample again. samples: nothing, only finished samples are kept. turns: its "
        "finished turns come back, as long as the --generate function asks for the same.",
        type=click.Choice([each.value for each in Resume]),
        default=_ENGINE.resume.value,
    ),
    _seconds(
        "--grace",
        _DEADLINES.drain,
        "Time that running groups have to finish after Ctrl-C or SIGTERM. A second signal cancels them at once.",
    ),
    option(
        "--out",
        "Folder for the results. If it has results of the same run, the run resumes: finished groups are skipped.",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        metavar="DIR",
    ),
    option(
        "--retry-quarantined",
        "Try quarantined groups of an earlier run again, with new tries. Their finished samples are kept.",
        is_flag=True,
    ),
    option(
        "--progress-every",
        "Time between two lines of progress, where the output is no terminal.",
        type=click.FloatRange(min=0, min_open=True),
        default=10.0,
        metavar="SECONDS",
    ),
    option("--quiet", "Print only errors and the groups that were not scored.", is_flag=True),
    option("--no-progress", "Print only the summary at the end.", is_flag=True),
)


def run_options(command: F) -> F:
    """Decorate a command with all options."""
    for declare in reversed(_OPTIONS):
        command = declare(command)
    return command


def _fail(path: Path, message: str) -> click.UsageError:
    return click.UsageError(f"configuration {path}: {message}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _fail(path, f"can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _fail(path, f"is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise _fail(path, f"is not TOML: {error}") from error


def _fits(parameter: click.Option, value: object) -> tuple[bool, str]:
    """Return if the value has the option's type, and the name of that type.

    click would take ``samples = 8.5`` for 8 and ``samples = true`` for 1.
    """
    if parameter.is_flag:
        return isinstance(value, bool), "true or false"
    if isinstance(parameter.type, click.types.IntParamType):
        return isinstance(value, int) and not isinstance(value, bool), "an integer"
    if isinstance(parameter.type, click.types.FloatParamType):
        return isinstance(value, int | float) and not isinstance(value, bool), "a number"
    return isinstance(value, str), "a string"


def _value(path: Path, parameter: click.Option, key: str, value: object) -> object:
    parts = value if parameter.multiple and isinstance(value, list) else [value]
    for part in parts:
        fits, wanted = _fits(parameter, part)
        if not fits:
            several = " or a list of strings" if parameter.multiple else ""
            raise _fail(path, f"{key}: got {part!r}, expected {wanted}{several}")
    return parts if parameter.multiple else value


def _unknown(path: Path, key: str, options: Mapping[str, click.Option]) -> click.UsageError:
    close = difflib.get_close_matches(key.replace("-", "_"), options, n=1)
    hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(sorted(options))}."
    return _fail(path, f"unknown key {key!r}.{hint}")


def read_config(path: Path, command: click.Command) -> dict[str, object]:
    """Return the file's values, checked against the command's options.

    Raises:
      click.UsageError: the file can't be read, is no TOML, or has an unknown key or a value of another type.
    """
    options = {
        str(parameter.name): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.expose_value
    }
    values: dict[str, object] = {}
    for key, value in _read(path).items():
        if key not in options:
            raise _unknown(path, key, options)
        values[key] = _value(path, options[key], key, value)
    return values


def _apply(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_config(path, context.command)}


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_apply,
    metavar="FILE.toml",
    help="Read options from this TOML file. Keys are the names of the options with underscores (max_new_tokens = 512). "
    "Options on the command line take precedence.",
)


_EPILOG = """\b
Exit status: 0 every group is scored, 1 the run failed, 2 wrong usage, 3 some groups are quarantined (they are
listed), 130 ended by Ctrl-C or SIGTERM. SIGUSR1 prints what every task is doing.
"""


@click.command("run", short_help="Sample and score prompts into a folder.", epilog=_EPILOG)
@config_option
@run_options
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Sample and score the prompts of a file, and write the results to a folder.

    Each prompt gets --samples rollouts, which are its group. Finished groups are written to --out as they come. Run the same
    command again to resume: finished groups are skipped, quarantined groups stay quarantined unless --retry-quarantined is
    given. Read the results with
    "trio-rollout export" and "trio-rollout inspect".
    """
    from ._run import execute  # ruff: ignore[import-outside-top-level]  --help must not wait for the engine

    context.exit(execute(RunOptions(**options)))
