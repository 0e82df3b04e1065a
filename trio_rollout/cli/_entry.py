"""The command ``trio-rollout``: its subcommands, and its errors as one clear line and an exit status.

``tiny-server`` is here, too; the other subcommands have modules.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from .._core.failures import leaves_of
from ..errors import RolloutError, SettingsError
from ..tiny import TinySettings, run_tiny
from ._export import export
from ._inspect import inspect
from ._options import COUNT, WHOLE, option
from ._outcome import ExitStatus
from ._run import run

F = TypeVar("F", bound=Callable[..., Any])

_TINY = TinySettings()
_SECONDS = click.FloatRange(0.0, min_open=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _line(error: BaseException) -> str:
    """Return an error's message, or its type if there is no message, with its notes."""
    return "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])


class Interrupted(click.ClickException):
    """A Ctrl-C outside of a run's drain. click would report it as a failure."""

    exit_code = ExitStatus.INTERRUPTED


def click_error(error: BaseException) -> click.ClickException | None:
    """Return the report of an error; None for a defect, whose traceback is wanted.

    A setting out of its range came from an option, so it is a usage error. Every other error of the package is a failure of
    the run.
    """
    leaves = leaves_of(error)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return Interrupted("interrupted")
    if not all(isinstance(leaf, RolloutError) for leaf in leaves):
        return None
    message = "\n".join(dict.fromkeys(map(_line, leaves)))
    if all(isinstance(leaf, SettingsError) for leaf in leaves):
        return click.UsageError(message)
    return click.ClickException(message)


class Commands(click.Group):
    """A group of commands that reports errors of the package as messages."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand.

        Raises:
          click.ClickException: the subcommand raised an error of the package; has the exit status.
        """
        try:
            return super().invoke(ctx)
        except (RolloutError, KeyboardInterrupt, BaseExceptionGroup) as error:
            reported = click_error(error)
            if reported is None:
                raise
            raise reported from error


def _tiny(name: str, help: str, kind: "click.ParamType[Any] | None" = None) -> Callable[[F], F]:  # ruff: ignore[builtin-argument-shadowing]
    """Return click's decorator for the option of one field of ``TinySettings``, with the field's default."""
    default = getattr(_TINY, name.removeprefix("--").replace("-", "_"))
    return option(name, help, type=kind, default=default, is_flag=isinstance(default, bool))


@click.command("tiny-server", short_help="Serve a tiny model, without a GPU.")
@option("--port", "Port to listen on; 0: a free port.", type=click.IntRange(0, 65535), required=True)
@option("--host", "Address to listen on.", default="127.0.0.1")
@_tiny("--script", "File with fixed answers by prompt (TOML or JSON).", _FILE)
@_tiny("--weights", "Weights to start with. Default: random weights.", click.Path(exists=True, path_type=Path))
@_tiny("--max-running", "Most requests decoded at once.", COUNT)
@_tiny("--max-queued", "Most requests that wait; further requests get HTTP 503. Default: no limit.", WHOLE)
@_tiny("--step-delay", "Seconds to wait after each decoding step.", click.FloatRange(0.0))
@_tiny("--seed", "Seed of the random weights and of sampling.", WHOLE)
@_tiny("--vocab", "Size of the vocabulary. Default: the tokenizer's.", click.IntRange(2))
@_tiny("--context-tokens", "Number of previous tokens that the model sees.", COUNT)
@_tiny("--rows", "Rows of the model's weight table.", COUNT)
@_tiny("--scale", "Standard deviation of the random logits.", click.FloatRange(0.0))
@_tiny("--eos-id", "Id of the end token; negative: none. Default: the tokenizer's.", click.INT)
@_tiny("--context-length", "Most tokens of prompt and answer together.", click.IntRange(2))
@_tiny("--cache-tokens", "Size of the prefix cache in tokens.", WHOLE)
@_tiny("--incremental", "Stream only new tokens, as SGLang's --incremental-streaming-output.")
@_tiny("--reasoning-parser", "Reasoning parser that /model_info names.")
@_tiny("--health-timeout", "Seconds after which /health fails.", _SECONDS)
@_tiny("--disconnect-poll", "Seconds between two checks for clients that have gone.", _SECONDS)
@_tiny("--abort-poll", "Seconds between two checks whether a pause is complete.", _SECONDS)
@option("--until-stdin-closes", "Exit when stdin is closed, so when the parent process has ended.", is_flag=True)
def tiny_server(port: int, host: str, *, until_stdin_closes: bool, **options: Any) -> None:
    """Serve a small real language model with SGLang's HTTP protocol.

    Prints the server's URL on a line once the server answers.
    """
    try:
        run_tiny(TinySettings(**options), host, port, click.echo, until_stdin_closes=until_stdin_closes)
    except OSError as error:
        raise click.ClickException(f"can't listen on {host}:{port}: {error.strerror or error}") from error


@click.group(
    cls=Commands,
    commands=[run, export, inspect, tiny_server],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="trio-rollout", prog_name="trio-rollout")
def main() -> None:
    """Run rollouts for reinforcement learning of language models, and inspect and export their results."""
