"""``trio-rollout tiny-server``: the tiny model as a server, one option for each field of its settings.

Separate because it is imported when it is used.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..tiny import TinySettings, run_tiny
from ._options import COUNT, WHOLE, option

F = TypeVar("F", bound=Callable[..., Any])

_TINY = TinySettings()
_SECONDS = click.FloatRange(0.0, min_open=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


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
