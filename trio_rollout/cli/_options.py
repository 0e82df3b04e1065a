"""A TOML file as the defaults of a command's options: its keys are the options' names with underscores.

What is typed on the command line wins. Nothing is guessed: an unknown key or a value of another type is an error that
names the file and the key.

What ``trio-rollout run`` can be told: every option once, with its help, and their values as one typed object.
"""

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click

from .._core.sampling import SamplingParams
from .._core.settings import Deadlines, EngineSettings, Retry


def _fail(path: Path, message: str) -> click.UsageError:
    return click.UsageError(f"configuration {path}: {message}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _fail(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _fail(path, f"is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise _fail(path, f"is not TOML: {error}") from error


def _fits(option: click.Option, value: object) -> tuple[bool, str]:
    """Whether the value's TOML type is the option's, and the name of the one that is wanted.

    click itself would take ``samples = 8.5`` for 8 and ``samples = true`` for 1.
    """
    if option.is_flag:
        return isinstance(value, bool), "true or false"
    if isinstance(option.type, click.types.IntParamType):
        return isinstance(value, int) and not isinstance(value, bool), "an integer"
    if isinstance(option.type, click.types.FloatParamType):
        return isinstance(value, int | float) and not isinstance(value, bool), "a number"
    return isinstance(value, str), "a string"


def _value(path: Path, option: click.Option, key: str, value: object) -> object:
    parts = value if option.multiple and isinstance(value, list) else [value]
    for part in parts:
        fits, wanted = _fits(option, part)
        if not fits:
            several = " or a list of such" if option.multiple else ""
            raise _fail(path, f"{key}: got {part!r}, expected {wanted}{several}")
    return parts if option.multiple else value


def _unknown(path: Path, key: str, options: Mapping[str, click.Option]) -> click.UsageError:
    close = difflib.get_close_matches(key.replace("-", "_"), options, n=1)
    hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(sorted(options))}."
    return _fail(path, f"unknown key {key!r}.{hint}")


def read_config(path: Path, command: click.Command) -> dict[str, object]:
    """The file's values, checked against the command's options.

    Raises:
      click.UsageError: the file can't be read, is no TOML, has an unknown key or a value of the wrong type.

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
    help="Take options from this TOML file: keys are named like the options, with underscores (max_new_tokens = 512). "
    "Options given on the command line win.",
)


F = TypeVar("F", bound=Callable[..., Any])

_SAMPLING, _ENGINE, _DEADLINES, _RETRY = SamplingParams(), EngineSettings(), Deadlines(), Retry()


@attrs.frozen(kw_only=True)
class RunOptions:
    """The options as click hands them over: types checked, names not yet resolved."""

    prompts: Path | None
    tasks: str | None
    task_seed: int
    prompt_key: str
    label_key: str
    metadata_key: str
    id_key: str | None
    epochs: int
    shuffle_seed: int | None
    server: tuple[str, ...]
    router: str | None
    tokenizer: str | None
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
    grace: float
    out: Path
    progress_every: float
    quiet: bool
    no_progress: bool


def _option(*names: str, help: str, **settings: Any) -> Callable[[F], F]:  # ruff: ignore[builtin-argument-shadowing]  as click's
    return click.option(*names, help=help, show_default=True, **settings)


_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0)

_INPUT = (
    _option(
        "--prompts",
        type=click.Path(path_type=Path),
        metavar="FILE.jsonl",
        help="The prompts: one JSON object a line, with the prompt as text, token ids or messages (those need "
        "--tokenizer), and optionally a label, metadata and an id.",
    ),
    _option(
        "--tasks",
        metavar="NAME:COUNT",
        help="In place of --prompts: so many generated tasks of this reasoning-gym data set; its own verifier is the "
        "reward unless --reward is given. Needs the extra 'tasks'.",
    ),
    _option("--task-seed", type=click.IntRange(min=0), default=0, help="Seed of the generated tasks."),
    _option("--prompt-key", default="prompt", metavar="KEY", help="Key of the prompt in each object."),
    _option("--label-key", default="label", metavar="KEY", help="Key of the label, which the reward gets to see."),
    _option("--metadata-key", default="metadata", metavar="KEY", help="Key of the metadata, an object."),
    _option("--id-key", metavar="KEY", help="Key of a unique id. Without it the line number is the id."),
    _option("--epochs", type=_COUNT, default=1, help="How many times to go through the prompts."),
    _option(
        "--shuffle-seed",
        type=click.IntRange(min=0),
        help="Shuffle the prompts of each epoch, repeatably. Without it: file order.",
    ),
)

_SERVERS = (
    _option(
        "--server",
        multiple=True,
        metavar="URL",
        help="An SGLang server; repeat the option for several. Without any, a tiny model is served by a process of its "
        "own for as long as the run lasts.",
    ),
    _option(
        "--router", metavar="URL", help="An SGLang router in front of the servers; they are discovered through it."
    ),
    _option(
        "--tokenizer",
        metavar="PATH",
        help="A folder with tokenizer.json (and a chat template): texts and messages are turned into ids here.",
    ),
    _option(
        "--vocab-size",
        type=_COUNT,
        help="Token ids at or above it are refused before they are sent. Without it the server's model is asked.",
    ),
    _option(
        "--api-key",
        envvar="TRIO_ROLLOUT_API_KEY",
        show_envvar=True,
        metavar="KEY",
        help="Sent to the servers as a bearer token. Better given in the environment: a command line can be read.",
    ),
)

_ROLLOUTS = (
    _option("--samples", type=_COUNT, default=_ENGINE.samples_per_prompt, help="Rollouts of each prompt: its group."),
    _option(
        "--reward",
        metavar="NAME",
        help="The score of a rollout: exact_match (the answer is the label), regex:PATTERN (the answer matches), or "
        "module:function with a trajectory as its argument, sync or async. Default: exact_match.",
    ),
    _option(
        "--generate",
        metavar="module:function",
        help="An async function (prompt, rollout) -> trajectory in place of a single turn.",
    ),
    _option(
        "--max-new-tokens",
        type=click.IntRange(min=0),
        default=_SAMPLING.max_new_tokens,
        help="Most tokens of one answer.",
    ),
    _option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=_SAMPLING.temperature,
        help="Sampling temperature; 0: greedy.",
    ),
    _option(
        "--top-p",
        type=click.FloatRange(min=0, max=1, min_open=True),
        default=_SAMPLING.top_p,
        help="Sample from the smallest set of tokens with this probability.",
    ),
    _option(
        "--top-k", type=click.IntRange(min=-1), default=_SAMPLING.top_k, help="Sample from so many tokens; -1: all."
    ),
    _option("--stop", multiple=True, metavar="TEXT", help="A text that ends an answer; may be repeated."),
)

_LIMITS = (
    _option(
        "--max-running",
        type=_COUNT,
        help=f"Rollouts running at once, over all servers. Default: {_ENGINE.max_running}, or --samples if that is more.",
    ),
    _option(
        "--group-deadline",
        type=_SECONDS,
        default=_DEADLINES.group,
        metavar="SECONDS",
        help="Most time for one attempt at a group, over everything it does; 0: no limit.",
    ),
    _option(
        "--turn-deadline",
        type=_SECONDS,
        default=_DEADLINES.turn,
        metavar="SECONDS",
        help="Most time for one answer of a server; 0: no limit.",
    ),
    _option(
        "--reward-deadline",
        type=_SECONDS,
        default=_DEADLINES.reward,
        metavar="SECONDS",
        help="Most time for scoring one rollout; 0: no limit.",
    ),
    _option(
        "--max-attempts",
        type=_COUNT,
        default=_RETRY.max_attempts,
        help="Attempts at a group that may fail (errors, deadlines) before it is quarantined.",
    ),
    _option(
        "--failure-budget",
        type=_COUNT,
        default=_ENGINE.failure_budget,
        help="So many groups quarantined in a row, without one that succeeds, end the run as failed.",
    ),
    _option(
        "--grace",
        type=_SECONDS,
        default=_DEADLINES.drain,
        metavar="SECONDS",
        help="After Ctrl-C: time for the running groups to finish. A second Ctrl-C cancels them at once.",
    ),
)

_OUTPUT = (
    _option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        metavar="DIR",
        help="The folder for the results. With one that has results of the same run, only what is missing is done.",
    ),
    _option(
        "--progress-every",
        type=click.FloatRange(min=0, min_open=True),
        default=10.0,
        metavar="SECONDS",
        help="Where the output is no terminal: time between two lines of progress.",
    ),
    _option("--quiet", is_flag=True, help="Print only errors and what was not done."),
    _option("--no-progress", is_flag=True, help="Print no progress, only the summary at the end."),
)


def run_options(command: F) -> F:
    """Decorates a command with all of them, in the order of the help."""
    declared: Sequence[Callable[[F], F]] = (*_INPUT, *_SERVERS, *_ROLLOUTS, *_LIMITS, *_OUTPUT)
    for declare in reversed(declared):
        command = declare(command)
    return command
